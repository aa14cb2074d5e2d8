"""The header parser against the reference reader."""

from __future__ import annotations

import cProfile
import json
import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from fastload_common.checkpoint.header import (
    MAX_HEADER_BYTES,
    Header,
    NeedMore,
    parse_header,
)
from fastload_common.errors import (
    CheckpointError,
    HeaderInvalidError,
    HeaderTooLargeError,
    ShardTruncatedError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.testing.checkpoints import (
    TensorSpec,
    encode_file,
    encode_header,
    random_tensor,
)
from fastload_common.testing.hostile_files import (
    HostileFile,
    foreign_files,
    hostile_files,
    raw_file,
)

URI = "file:///models/x/model.safetensors"


def object_of(data: bytes) -> ObjectId:
    return ObjectId(URI, None, len(data))


def parse(data: bytes) -> Header:
    header = parse_header(data, object_of(data))
    assert isinstance(header, Header)
    return header


def reference(path: Path) -> dict[str, tuple[str, list[int]]] | None:
    """What the reference reader finds; None if it refuses the file."""
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    except SafetensorError:
        return None


@pytest.mark.parametrize("file", hostile_files(), ids=lambda file: file.name)
def test_catalogue_agrees_with_the_reference(file: HostileFile, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file.data)
    expected = reference(path)
    assert (expected is not None) == file.accepted
    if expected is None:
        with pytest.raises(CheckpointError) as caught:
            parse(file.data)
        assert URI in str(caught.value)
        assert len(str(caught.value)) < 2000
        assert caught.value.hint
        return
    header = parse(file.data)
    assert {e.name: (e.dtype, list(e.shape)) for e in header.entries} == expected
    assert sum(e.byte_range.size_bytes for e in header.entries) + header.header_bytes == len(
        file.data
    )


@pytest.mark.parametrize("file", list(foreign_files()), ids=lambda file: file.name)
def test_f04_foreign_file_is_named(file: HostileFile) -> None:
    # At most eight bytes are asked for before the file is refused.
    with pytest.raises(HeaderInvalidError, match=file.looks):
        parse_header(file.data[:512], object_of(file.data))


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**62, 2**64 - 1])
def test_f04_claimed_length_above_the_limit_is_never_asked_for(length: int) -> None:
    data = raw_file("{}", length=length)
    with pytest.raises(HeaderTooLargeError, match=str(length)):
        parse_header(data[:8], object_of(data))


def test_f04_claimed_length_is_compared_with_the_object_first() -> None:
    data = raw_file('{"a', length=50_000_000)
    with pytest.raises(ShardTruncatedError, match="50000008"):
        parse_header(data[:8], object_of(data))


def test_header_of_exactly_the_limit(tmp_path: Path) -> None:
    data = raw_file(b"{}".ljust(MAX_HEADER_BYTES))
    assert parse(data).header_bytes == MAX_HEADER_BYTES + 8
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert reference(path) == {}


def test_asks_for_what_is_lacking_and_never_for_more() -> None:
    data = encode_file({"a": random_tensor("F32", [1000])})
    (length,) = struct.unpack_from("<Q", data)
    for prefix_bytes in range(8):
        assert parse_header(data[:prefix_bytes], object_of(data)) == NeedMore(8)
    for prefix_bytes in (8, 9, length + 7):
        assert parse_header(data[:prefix_bytes], object_of(data)) == NeedMore(length + 8)
    assert parse_header(data[: length + 8], object_of(data)) == parse(data)


def test_f01_zero_element_tensors_have_empty_ranges() -> None:
    tensors = {
        "first": random_tensor("F32", [0]),
        "a": random_tensor("BF16", [3]),
        "middle": random_tensor("F32", [0, 4096]),
        "b": random_tensor("U8", [5]),
        "last": random_tensor("BF16", [4096, 0]),
    }
    data = encode_file(tensors)
    entries = {entry.name: entry for entry in parse(data).entries}
    assert list(entries) == list(tensors)
    for name, spec in tensors.items():
        entry = entries[name]
        assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape)
        assert data[entry.byte_range.start : entry.byte_range.end] == spec.data
    assert entries["last"].byte_range == ByteRange(len(data), len(data))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3", "I64"])
def test_f02_scalar_keeps_its_shape(dtype: str) -> None:
    spec = random_tensor(dtype, [])
    data = encode_file({"input_scale": spec})
    (entry,) = parse(data).entries
    assert entry.shape == ()
    assert data[entry.byte_range.start : entry.byte_range.end] == spec.data


def cuts() -> dict[str, int]:
    data = encode_file(f05_tensors())
    header_bytes = parse(data).header_bytes
    return {
        "length field": 8,
        "inside the length field": 5,
        "mid header": header_bytes // 2,
        "whole header": header_bytes,
        "mid tensor": header_bytes + 1000,
        "page boundary": 4096,
        "one byte": len(data) - 1,
    }


def f05_tensors() -> dict[str, TensorSpec]:
    return {f"w{i}": random_tensor("F32", [50, 10], seed=i) for i in range(4)}


@pytest.mark.parametrize("cut", cuts())
def test_f05_short_file_is_refused_with_both_sizes(cut: str) -> None:
    data = encode_file(f05_tensors())
    left = data[: cuts()[cut]]
    with pytest.raises(CheckpointError) as caught:
        parse_header(left, object_of(left))
    text = str(caught.value)
    assert URI in text
    assert str(len(left)) in text
    if len(left) >= 8:
        assert isinstance(caught.value, ShardTruncatedError)
        header_bytes = parse(data).header_bytes
        assert str(len(data) if len(left) >= header_bytes else header_bytes) in text
        # A hole in a file of the right size cannot be seen here: the message says what can.
        assert "checksum" in caught.value.hint


def test_f05_long_file_is_refused() -> None:
    data = encode_file(f05_tensors()) + bytes(3)
    with pytest.raises(HeaderInvalidError, match="3 bytes follow the last tensor"):
        parse(data)


@pytest.mark.parametrize("residue", range(8))
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "F64"])
def test_f08_unaligned_data_has_exact_ranges(dtype: str, residue: int, tmp_path: Path) -> None:
    odd, other = random_tensor("U8", [3]), random_tensor(dtype, [5, 3])
    entries = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "other": {"dtype": dtype, "shape": [5, 3], "data_offsets": [3, 3 + len(other.data)]},
    }
    text = json.dumps(entries).encode()
    text += b" " * ((residue - len(text)) % 8)
    data = raw_file(text, odd.data + other.data)
    header = parse(data)
    assert header.header_bytes % 8 == residue
    for entry, spec in zip(header.entries, (odd, other), strict=True):
        assert data[entry.byte_range.start : entry.byte_range.end] == spec.data
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert reference(path) == {"odd": ("U8", [3]), "other": (dtype, [5, 3])}


def test_f09_unknown_dtype_names_tensor_and_dtype() -> None:
    data = encode_file({"lm_head.weight": TensorSpec("F7", (1,), b"\0")})
    with pytest.raises(HeaderInvalidError, match=r"'lm_head\.weight'.*'F7'"):
        parse(data)


def test_entries_come_in_order_of_their_bytes() -> None:
    tensors = {name: random_tensor("F32", [2], seed=ord(name)) for name in "cab"}
    data = encode_file(tensors, header_order=["a", "b", "c"], metadata={"format": "pt"})
    header = parse(data)
    assert [entry.name for entry in header.entries] == ["c", "a", "b"]
    assert header.metadata == {"format": "pt"}


def test_hostile_name_does_not_flood_the_message() -> None:
    data = encode_header({"n" * 1_000_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 5]}})
    data += bytes(5)
    with pytest.raises(HeaderInvalidError) as caught:
        parse(data)
    assert len(str(caught.value)) < 1000


def header_of(count: int) -> tuple[bytes, ObjectId]:
    entries = {
        f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.gate_proj.weight": {
            "dtype": "BF16",
            "shape": [2, 3],
            "data_offsets": [12 * i, 12 * i + 12],
        }
        for i in range(count)
    }
    prefix = encode_header(entries)
    return prefix, ObjectId(URI, None, len(prefix) + 12 * count)


def test_the_work_for_a_header_grows_with_its_tensors_only() -> None:
    """100,000 tensors take about half a second; a square law would take hours."""
    calls = {}
    for count in (1_000, 100_000):
        prefix, object_id = header_of(count)
        profiler = cProfile.Profile()
        header = profiler.runcall(parse_header, prefix, object_id)
        assert isinstance(header, Header)
        assert len(header.entries) == count
        calls[count] = sum(row.callcount for row in profiler.getstats())
    assert calls[100_000] <= 110 * calls[1_000]
