"""Headers and index become one checkpoint."""

from __future__ import annotations

import json

import pytest

from fastload_common.checkpoint.assemble import ShardHeader, assemble
from fastload_common.checkpoint.header import Header, parse_header
from fastload_common.checkpoint.index import CheckpointIndex, parse_index
from fastload_common.errors import CheckpointError, TensorMissingError
from fastload_common.ranges import ObjectId
from fastload_common.testing.checkpoints import TensorSpec, encode_file, random_tensor

ROOT = "s3://b/m"
F32, U8 = random_tensor("F32", [2]), random_tensor("U8", [8])


def shard(key: str, tensors: dict[str, TensorSpec], **metadata: str) -> ShardHeader:
    data = encode_file(tensors, metadata=metadata)
    object_id = ObjectId(f"{ROOT}/{key}", None, len(data))
    header = parse_header(data, object_id)
    assert isinstance(header, Header)
    return ShardHeader(key, object_id, header)


def index(**weight_map: str) -> CheckpointIndex:
    text = json.dumps({"weight_map": weight_map}).encode()
    return parse_index(text, key="model.safetensors.index.json", root=ROOT)


A, B = "a.safetensors", "b.safetensors"


def test_order_is_by_shard_then_by_offset() -> None:
    shards = [shard(B, {"z": F32, "y": F32}), shard(A, {"x": F32, "w": F32})]
    checkpoint, duplicates = assemble(ROOT, shards, ignored_keys=["c"])
    assert list(checkpoint.entries) == ["z", "y", "x", "w"]
    assert duplicates == ()
    assert [(s.key, s.tensor_count) for s in checkpoint.shards] == [(B, 2), (A, 2)]
    assert checkpoint.shards[0].header_bytes == shards[0].header.header_bytes
    assert checkpoint.ignored_keys == ("c",)
    assert checkpoint.tensor_bytes == 4 * 8


def test_metadata_of_the_first_shard_wins() -> None:
    shards = [shard(A, {"x": F32}, format="pt", a="1"), shard(B, {"y": F32}, a="2", b="3")]
    assert assemble(ROOT, shards)[0].metadata == {"format": "pt", "a": "1", "b": "3"}


@pytest.mark.parametrize("named", [A, B])
def test_f12_copy_of_the_index_wins(named: str) -> None:
    shards = [shard(A, {"x": F32, "w": F32}), shard(B, {"v": F32, "x": U8})]
    checkpoint, duplicates = assemble(ROOT, shards, index=index(w=A, v=B, x=named))
    assert checkpoint.entries["x"].object_id.uri == f"{ROOT}/{named}"
    assert duplicates == ()
    # The rows stand where their bytes lie.
    assert list(checkpoint.entries) == (["x", "w", "v"] if named == A else ["w", "v", "x"])


@pytest.mark.parametrize("use_index", [False, True])
def test_f12_copies_that_nothing_decides_must_be_alike(use_index: bool) -> None:
    which = index(w=A, v=B) if use_index else None
    shards = [shard(A, {"w": F32, "x": F32}), shard(B, {"v": F32, "x": F32})]
    _, (duplicate,) = assemble(ROOT, shards, index=which)
    assert duplicate.kept.object_id.uri == f"{ROOT}/{A}"
    assert duplicate.other.object_id.uri == f"{ROOT}/{B}"
    shards[1] = shard(B, {"v": F32, "x": U8})
    with pytest.raises(CheckpointError, match=r"'x'.*/a\.safetensors.*/b\.safetensors.*F32.*U8"):
        assemble(ROOT, shards, index=which)


def test_tensor_that_its_file_lacks_is_missing() -> None:
    shards = [shard(A, {"w": F32}), shard(B, {"v": F32})]
    with pytest.raises(TensorMissingError) as caught:
        assemble(ROOT, shards, index=index(w=A, v=A, u=B))
    text = str(caught.value)
    assert "names 2 tensors" in text
    assert "'v' in a.safetensors (it stands in b.safetensors)" in text
    assert "'u' in b.safetensors" in text


def test_tensor_that_the_index_does_not_name_is_there() -> None:
    checkpoint, _ = assemble(ROOT, [shard(A, {"w": F32, "extra": U8})], index=index(w=A))
    assert list(checkpoint.entries) == ["w", "extra"]
