"""Random headers, valid and broken, against the reference reader."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from fastload_common.checkpoint.dtypes import DTYPE_BITS
from fastload_common.checkpoint.header import Header, parse_header
from fastload_common.errors import CheckpointError
from fastload_common.ranges import ObjectId
from fastload_common.testing.checkpoints import TensorSpec, encode_file, random_tensor
from fastload_common.testing.hostile_files import hostile_files

# The same examples in each run, and no limit on time: the machine may be busy.
STEADY = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# A size of 8 lets every dtype end at a byte.
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=3).map(lambda s: [8, *s])
SPECS = st.builds(random_tensor, st.sampled_from(sorted(DTYPE_BITS)), SHAPES, st.integers(0, 9))
TENSORS = st.dictionaries(NAMES.filter(lambda n: n != "__metadata__"), SPECS, max_size=5)
METADATA = st.none() | st.dictionaries(NAMES, NAMES, max_size=3)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES | st.sampled_from([0, 4, 8]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("properties") / "model.safetensors"


def reference(data: bytes, path: Path) -> dict[str, tuple[str, list[int]]] | None:
    path.write_bytes(data)
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
    except SafetensorError:
        return None


def ours(data: bytes) -> dict[str, tuple[str, list[int]]] | None:
    try:
        header = parse_header(data, ObjectId("file:///m", None, len(data)))
    except CheckpointError:
        return None
    assert isinstance(header, Header)
    return {entry.name: (entry.dtype, list(entry.shape)) for entry in header.entries}


@settings(STEADY)
@given(TENSORS, METADATA, st.integers(1, 9), st.randoms(use_true_random=False))
def test_valid_files_round_trip(
    path: Path,
    tensors: dict[str, TensorSpec],
    metadata: dict[str, str] | None,
    padding_to: int,
    random: Any,
) -> None:
    order = list(tensors)
    random.shuffle(order)
    data = encode_file(tensors, metadata=metadata, padding_to=padding_to, header_order=order)
    header = parse_header(data, ObjectId("file:///m", None, len(data)))
    assert isinstance(header, Header)
    assert header.metadata == (metadata or {})
    found = {
        e.name: TensorSpec(e.dtype, e.shape, data[e.byte_range.start : e.byte_range.end])
        for e in header.entries
    }
    assert found == tensors
    starts = [entry.byte_range for entry in header.entries]
    assert starts == sorted(starts)
    assert ours(data) == reference(data, path)


MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["flip", "insert", "delete", "repeat"]), st.integers(0, 10**6),
              st.sampled_from(list(b'{}[]",:0189-+.eE\\ u dtFIBU\x00\xff') ) ),
    min_size=1, max_size=4,
)  # fmt: skip


def mutate(text: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    changed = bytearray(text)
    for kind, where, byte in mutations:
        position = where % (len(changed) + 1)
        if kind == "insert" or position == len(changed):
            changed.insert(position, byte)
        elif kind == "flip":
            changed[position] = byte
        elif kind == "delete":
            del changed[position]
        else:
            changed[position:position] = changed[position : position + 9]
    return bytes(changed)


@settings(STEADY, max_examples=400)
@given(TENSORS, MUTATIONS)
def test_broken_text_is_refused_as_by_the_reference(
    path: Path, tensors: dict[str, TensorSpec], mutations: list[tuple[str, int, int]]
) -> None:
    whole = encode_file(tensors, metadata={"format": "pt"})
    (length,) = struct.unpack_from("<Q", whole)
    text = mutate(whole[8 : 8 + length], mutations)
    data = struct.pack("<Q", len(text)) + text + whole[8 + length :]
    assert ours(data) == reference(data, path)


@settings(STEADY, max_examples=400)
@given(st.sampled_from([file for file in hostile_files() if len(file.data) < 2000]), MUTATIONS)
def test_broken_files_of_the_catalogue(
    path: Path, file: Any, mutations: list[tuple[str, int, int]]
) -> None:
    data = mutate(file.data, mutations)
    assert ours(data) == reference(data, path)


@settings(STEADY, max_examples=300)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "U8", "F4"]) | JSON,
            "shape": st.sampled_from([[1], [], [0], [2, 2]]) | JSON,
            "data_offsets": st.sampled_from([[0, 4], [0, 0], [4, 0]]) | JSON,
            "extra": JSON,
        },
    )
    | JSON,
    st.integers(0, 8),
    st.booleans(),
)
@example({"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "extra": 10**400}, 4, False)
def test_any_json_is_taken_as_by_the_reference(
    path: Path, entry: Any, size_bytes: int, as_metadata: bool
) -> None:
    text = json.dumps({"__metadata__" if as_metadata else "a": entry}).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(size_bytes)
    assert ours(data) == reference(data, path)
