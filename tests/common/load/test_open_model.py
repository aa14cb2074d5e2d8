"""Opening checkpoints in directories and on the real S3 server, request by request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    CheckpointError,
    HeaderInvalidError,
    ShardMissingError,
    ShardTruncatedError,
)
from fastload_common.load.open_model import open_checkpoint
from fastload_common.source.base import ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.testing.checkpoints import (
    random_tensor,
    tiny_layers,
    write_checkpoint,
)
from fastload_common.testing.recording_source import RecordingSource, read_tensors

MakeSource = Callable[[Path], ObjectSource]
SETTINGS = Settings()


# What is there is found, byte for byte


@pytest.mark.parametrize("shards", [1, 3])
def test_bytes_equal_the_reference(tmp_path: Path, make_source: MakeSource, shards: int) -> None:
    tensors = tiny_layers()
    paths = write_checkpoint(tmp_path, tensors, shards=shards, padding_to=1)
    source = make_source(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    assert list(checkpoint.entries) == list(tensors)
    assert [shard.key for shard in checkpoint.shards] == [path.name for path in paths]
    assert read_tensors(source, checkpoint) == tensors
    names = []
    for path in paths:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                entry = checkpoint.entries[name]
                assert tuple(file.get_slice(name).get_shape()) == entry.shape
                assert file.get_slice(name).get_dtype() == entry.dtype
                names.append(name)
    assert set(names) == set(checkpoint.entries)


def test_f01_only_empty_tensors(tmp_path: Path, make_source: MakeSource) -> None:
    tensors = {"a": random_tensor("F32", [0]), "b": random_tensor("BF16", [0, 4096])}
    write_checkpoint(tmp_path, tensors)
    source = make_source(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    assert read_tensors(source, checkpoint) == tensors
    assert checkpoint.tensor_bytes == 0


def test_f02_scalar_as_the_only_tensor(tmp_path: Path, make_source: MakeSource) -> None:
    tensors = {"k_scale": random_tensor("F8_E4M3", [])}
    write_checkpoint(tmp_path, tensors)
    source = make_source(tmp_path)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors


# Requests


def test_small_headers_take_one_request_each_and_no_tensor_is_read(tmp_path: Path) -> None:
    tensors = {**tiny_layers(), "big": random_tensor("U8", [1_000_000])}
    write_checkpoint(tmp_path, tensors, shards=3)
    source = RecordingSource(tmp_path)
    open_checkpoint(source, SETTINGS)
    assert source.lists == [False]
    assert len(source.reads) == 4  # the index and three shards
    (only,) = source.reads_of("model-00003-of-00003.safetensors")
    assert only == (0, 128 * 1024)


def test_long_header_takes_a_second_request_for_the_rest_only(tmp_path: Path) -> None:
    tensors = {f"{'n' * 200}.{i}": random_tensor("U8", [1], seed=i) for i in range(2000)}
    (path,) = write_checkpoint(tmp_path, tensors)
    source = RecordingSource(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    header_bytes = checkpoint.shards[0].header_bytes
    assert header_bytes > 128 * 1024
    assert source.reads_of(path.name) == [(0, 128 * 1024), (128 * 1024, header_bytes)]


def test_index_tells_how_long_headers_are(tmp_path: Path) -> None:
    tensors = {f"{'n' * 200}.{i}": random_tensor("U8", [1], seed=i) for i in range(4000)}
    paths = write_checkpoint(tmp_path, tensors, shards=2)
    source = RecordingSource(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    for path, shard in zip(paths, checkpoint.shards, strict=True):
        ((start, end),) = source.reads_of(path.name)
        assert start == 0
        assert end >= shard.header_bytes


@pytest.mark.parametrize("threads", [1, 7])
def test_order_does_not_depend_on_threads(tmp_path: Path, threads: int) -> None:
    write_checkpoint(tmp_path, tiny_layers(40), shards=12)
    one = open_checkpoint(LocalSource(tmp_path), SETTINGS, threads=threads)
    assert list(one.entries) == list(tiny_layers(40))


def test_phases_are_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_layers())
    told: list[str] = []

    class Phases:
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            told.append(name)
            yield
            told.append(f"/{name}")

    open_checkpoint(LocalSource(tmp_path), SETTINGS, phases=Phases())
    assert told == ["list", "/list", "headers", "/headers"]


# F04, F05: not what it should be


def test_f04_lfs_pointer(tmp_path: Path, make_source: MakeSource) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(HeaderInvalidError, match=r"model\.safetensors.*Git-LFS pointer"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


def test_f04_empty_file(tmp_path: Path, make_source: MakeSource) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(HeaderInvalidError, match=r"model\.safetensors.*empty file"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


@pytest.mark.parametrize("left", ["8", "header/2", "header+5", "4096", "size-1"])
def test_f05_one_of_four_shards_is_short(
    tmp_path: Path, make_source: MakeSource, left: str
) -> None:
    paths = write_checkpoint(tmp_path, tiny_layers(100), shards=4)
    whole = open_checkpoint(LocalSource(tmp_path), SETTINGS)
    size_bytes = paths[2].stat().st_size
    header_bytes = whole.shards[2].header_bytes
    cut = {
        "8": 8,
        "header/2": header_bytes // 2,
        "header+5": header_bytes + 5,
        "4096": 4096,
        "size-1": size_bytes - 1,
    }[left]
    os.truncate(paths[2], cut)
    with pytest.raises(ShardTruncatedError) as caught:
        open_checkpoint(make_source(tmp_path), SETTINGS)
    text = str(caught.value)
    assert paths[2].name in text
    assert str(cut) in text
    assert str(size_bytes if cut >= header_bytes else header_bytes) in text


def test_f05_sparse_shard_passes_because_only_a_digest_could_tell(tmp_path: Path) -> None:
    (path,) = write_checkpoint(tmp_path, {"w": random_tensor("U8", [8192])})
    size_bytes = path.stat().st_size
    os.truncate(path, size_bytes - 4096)
    os.truncate(path, size_bytes)
    assert list(open_checkpoint(LocalSource(tmp_path), SETTINGS).entries) == ["w"]


def test_every_damaged_shard_is_named_at_once(tmp_path: Path) -> None:
    paths = write_checkpoint(tmp_path, tiny_layers(), shards=5)
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    paths[3].write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(LocalSource(tmp_path), SETTINGS)
    assert paths[1].name in str(caught.value)
    assert paths[3].name in str(caught.value)


# F10: listed, but not there


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "I32"])
def test_f10_missing_shard(tmp_path: Path, make_source: MakeSource, dtype: str) -> None:
    tensors = {f"w{i}": random_tensor(dtype, [8], seed=i) for i in range(12)}
    paths = write_checkpoint(tmp_path, tensors, shards=4)
    paths[2].unlink()
    with pytest.raises(ShardMissingError, match=rf"{paths[2].name} \(3 tensors\)"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


def test_f10_without_listing_the_index_names_the_files(tmp_path: Path) -> None:
    tensors = tiny_layers()
    write_checkpoint(tmp_path, tensors, shards=4)
    source = RecordingSource(tmp_path, may_list=False)
    checkpoint = open_checkpoint(source, SETTINGS)
    assert read_tensors(LocalSource(tmp_path), checkpoint) == tensors


@pytest.mark.parametrize("answer", ["missing", "denied"])
def test_f10_without_listing_missing_shards_are_named(tmp_path: Path, answer: str) -> None:
    paths = write_checkpoint(tmp_path, tiny_layers(), shards=4)
    source = RecordingSource(tmp_path, may_list=False)
    for path in (paths[1], paths[2]):
        path.unlink()
        if answer == "denied":
            source.denied.add(path.name)
    with pytest.raises(ShardMissingError) as caught:
        open_checkpoint(source, SETTINGS)
    for path in (paths[1], paths[2]):
        assert f"{path.name} (8 tensors)" in str(caught.value)
    if answer == "denied":
        assert "access denied" in caught.value.__notes__[0]


@pytest.mark.parametrize("stem", ["model", "consolidated"])
def test_f10_without_listing_one_file_of_a_usual_name(tmp_path: Path, stem: str) -> None:
    tensors = tiny_layers()
    write_checkpoint(tmp_path, tensors, stem=stem)
    source = RecordingSource(tmp_path, may_list=False)
    prefer = {"model": "hf", "consolidated": "mistral"}[stem]
    assert list(open_checkpoint(source, SETTINGS, prefer=prefer).entries) == list(tensors)
    assert list(open_checkpoint(source, SETTINGS, prefer="auto").entries) == list(tensors)


def test_without_listing_and_with_nothing_the_denial_is_told(tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match="listing is not allowed") as caught:
        open_checkpoint(RecordingSource(tmp_path, may_list=False), SETTINGS)
    assert "model.safetensors" in caught.value.__notes__[0]
