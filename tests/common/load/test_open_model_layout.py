"""Which files and which copies an opened checkpoint takes, in directories and on the S3 server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    CheckpointError,
    NoWeightsError,
    ObjectChangedError,
    ObjectMissingError,
    RangeMismatchError,
    ShardMissingError,
    TensorMissingError,
)
from fastload_common.load.open_model import open_checkpoint
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.source.registry import open_source
from fastload_common.testing.checkpoints import (
    TensorSpec,
    encode_file,
    random_tensor,
    tiny_layers,
    write_checkpoint,
    write_index,
)
from fastload_common.testing.recording_source import RecordingSource, read_tensors
from fastload_common.testing.s3_server import S3Server

MakeSource = Callable[[Path], ObjectSource]
SETTINGS = Settings()


# F11, F12, F13, F14: which files, which copies


def test_f11_files_that_are_not_listed_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tiny_layers()
    write_checkpoint(
        tmp_path, {n: random_tensor("U8", [5]) for n in tensors}, shards=2, index=False
    )
    write_checkpoint(tmp_path, tensors, shards=4)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not even a file")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02.")
    source = RecordingSource(tmp_path)
    with caplog.at_level("INFO"):
        checkpoint = open_checkpoint(source, SETTINGS)
    assert read_tensors(LocalSource(tmp_path), checkpoint) == tensors
    read = {name for name, _, _ in source.reads}
    assert read == {f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)} | {
        "model.safetensors.index.json"
    }
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("fastload")]
    for name in ("model-00001-of-00002", "adapter_model.safetensors", "training_args.bin"):
        assert name in line


NAME = "layers.0.q_proj.weight"


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("named", [1, 2])
def test_f12_copy_of_the_index_wins(
    tmp_path: Path, make_source: MakeSource, named: int, threads: int
) -> None:
    shards = [
        {"a": random_tensor("F32", [1]), NAME: random_tensor("F32", [9], seed=1)},
        {NAME: random_tensor("F32", [9], seed=2), "b": random_tensor("F32", [99])},
    ]
    names = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
    for name, tensors in zip(names, shards, strict=True):
        (tmp_path / name).write_bytes(encode_file(tensors))
    write_index(tmp_path, {"a": names[0], "b": names[1], NAME: names[named - 1]})
    source = make_source(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS, threads=threads)
    assert read_tensors(source, checkpoint)[NAME] == shards[named - 1][NAME]


@pytest.mark.parametrize("size", [9, 3_000_000])
@pytest.mark.parametrize("differ", [False, True])
def test_f12_without_an_index_copies_must_be_the_same(
    tmp_path: Path, make_source: MakeSource, size: int, differ: bool
) -> None:
    one = random_tensor("F32", [size])
    # The last byte of all: every piece must have been compared.
    last = bytes([one.data[-1] ^ 1]) if differ else one.data[-1:]
    other = TensorSpec(one.dtype, one.shape, one.data[:-1] + last)
    (tmp_path / "a.safetensors").write_bytes(encode_file({NAME: one}))
    (tmp_path / "b.safetensors").write_bytes(encode_file({"x": one, NAME: other}))
    source = make_source(tmp_path)
    if not differ:
        checkpoint = open_checkpoint(source, SETTINGS)
        assert checkpoint.entries[NAME].object_id.uri.endswith("a.safetensors")
        return
    with pytest.raises(CheckpointError, match=r"a\.safetensors.*b\.safetensors.*different values"):
        open_checkpoint(source, SETTINGS)


@pytest.mark.parametrize("prefer", ["hf", "mistral"])
def test_f13_exactly_one_set_is_read(tmp_path: Path, prefer: str) -> None:
    hf = tiny_layers()
    mistral = {f"m.{name}": spec for name, spec in hf.items()}
    write_checkpoint(tmp_path, hf, shards=3)
    write_checkpoint(tmp_path, mistral, shards=2, stem="consolidated")
    (tmp_path / "params.json").write_text("{}")
    source = RecordingSource(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS, prefer=prefer)
    wanted = {"hf": hf, "mistral": mistral}[prefer]
    assert read_tensors(LocalSource(tmp_path), checkpoint) == wanted
    stem = {"hf": "model", "mistral": "consolidated"}[prefer]
    assert {name.partition("-")[0].partition(".")[0] for name, _, _ in source.reads} == {stem}


def test_f14_folders_are_not_even_listed(tmp_path: Path, make_source: MakeSource) -> None:
    tensors = tiny_layers()
    write_checkpoint(tmp_path, tensors)
    for folder in ("original", "checkpoint-500", "a/b"):
        write_checkpoint(tmp_path / folder, {n: random_tensor("U8", [5]) for n in tensors})
    (tmp_path / "README.md").write_text("x")
    source = make_source(tmp_path)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors
    recorder = RecordingSource(tmp_path)
    open_checkpoint(recorder, SETTINGS)
    assert recorder.lists == [False]


def test_patterns_may_name_a_folder(tmp_path: Path, make_source: MakeSource) -> None:
    write_checkpoint(tmp_path, tiny_layers())
    other = {"w": random_tensor("F32", [3])}
    write_checkpoint(tmp_path / "text" / "encoder", other)
    source = make_source(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS, patterns=["text/encoder/*.safetensors"])
    assert read_tensors(source, checkpoint) == other


def test_index_may_name_a_folder(tmp_path: Path, make_source: MakeSource) -> None:
    tensors = {"w": random_tensor("F32", [3])}
    write_checkpoint(tmp_path / "parts", tensors)
    write_index(tmp_path, {"w": "parts/model.safetensors"})
    source = make_source(tmp_path)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors
    (tmp_path / "parts" / "model.safetensors").unlink()
    with pytest.raises(ShardMissingError, match=r"parts/model\.safetensors \(1 tensors\)"):
        open_checkpoint(LocalSource(tmp_path), SETTINGS)


# F17, F18: tied embeddings. What the files hold is what there is


@pytest.mark.parametrize("lm_head", ["absent", "copy", "its own"])
@pytest.mark.parametrize("shards", [1, 2])
def test_f17_f18_lm_head_is_neither_invented_nor_dropped(
    tmp_path: Path, shards: int, lm_head: str
) -> None:
    embed = random_tensor("BF16", [16, 4])
    tensors = {"model.embed_tokens.weight": embed, "model.norm.weight": random_tensor("BF16", [4])}
    if lm_head != "absent":
        own = random_tensor("BF16", [16, 4], seed=1)
        tensors["lm_head.weight"] = embed if lm_head == "copy" else own
    write_checkpoint(tmp_path, tensors, shards=shards)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    source = LocalSource(tmp_path)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors


# F21: a hub cache's layout


def hub_cache(root: Path, tensors: dict[str, TensorSpec]) -> Path:
    """A hub cache's folders: blobs, links in a snapshot, a reference; returns the snapshot."""
    snapshot = root / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("c" * 40)
    for path in write_checkpoint(root / "blobs", tensors, shards=2):
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    index = "model.safetensors.index.json"
    (snapshot / index).symlink_to(Path("../../blobs") / index)
    return snapshot


def test_f21_snapshot_of_links(tmp_path: Path) -> None:
    tensors = tiny_layers()
    snapshot = hub_cache(tmp_path / "models--a--b", tensors)
    source = LocalSource(snapshot)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors


def test_f21_outer_folder_gives_the_hint(tmp_path: Path, make_source: MakeSource) -> None:
    hub_cache(tmp_path, tiny_layers())
    with pytest.raises(NoWeightsError, match="hub cache; use .*/snapshots/" + "c" * 40):
        open_checkpoint(make_source(tmp_path), SETTINGS)


def test_f21_link_that_leads_nowhere(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, tiny_layers())
    (tmp_path / "blobs" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ShardMissingError, match="links lead nowhere, such as model-00002-of-00002"):
        open_checkpoint(LocalSource(snapshot), SETTINGS)


def test_f21_two_names_of_one_file_are_not_compared(tmp_path: Path) -> None:
    tensors = tiny_layers()
    (path,) = write_checkpoint(tmp_path, tensors)
    (tmp_path / "again.safetensors").symlink_to(path.name)
    source = RecordingSource(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    assert list(checkpoint.entries) == list(tensors)
    assert len(source.reads) == 2


# Other bad input


def test_tensor_that_its_file_lacks(tmp_path: Path, make_source: MakeSource) -> None:
    write_checkpoint(tmp_path, tiny_layers(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(TensorMissingError, match=r"extra\.weight"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_wrong_index(tmp_path: Path, make_source: MakeSource, text: str) -> None:
    write_checkpoint(tmp_path, tiny_layers(), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


def test_pickles_only(tmp_path: Path, make_source: MakeSource) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoWeightsError, match=r"pytorch_model\.bin"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


@pytest.mark.s3
def test_nothing_under_the_prefix(s3_bucket: str) -> None:
    source = open_source(f"s3://{s3_bucket}/nothing", SETTINGS)
    with pytest.raises(NoWeightsError, match=f"s3://{s3_bucket}/nothing: nothing stands there"):
        open_checkpoint(source, SETTINGS)
    source.close()


@pytest.mark.parametrize("handed_on", [False, True])
def test_a_folder_above_models_names_them(
    tmp_path: Path, make_source: MakeSource, handed_on: bool
) -> None:
    for name in ("first", "team/second"):
        write_checkpoint(tmp_path / name, tiny_layers())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("x")
    source = make_source(tmp_path)
    listed = source.list() if handed_on else None
    with pytest.raises(NoWeightsError, match="weights stand in first/, team/second/") as caught:
        open_checkpoint(source, SETTINGS, listed=listed)
    assert caught.value.hint.endswith(f"e.g. {source.root}/first/")


def test_a_file_names_its_folder(tmp_path: Path) -> None:
    (path,) = write_checkpoint(tmp_path, tiny_layers())
    with pytest.raises(ObjectMissingError, match=rf"is named like a file.*{tmp_path}$"):
        open_checkpoint(LocalSource(path), SETTINGS)


@pytest.mark.s3
def test_an_object_names_its_folder(s3_bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    (path,) = write_checkpoint(tmp_path, tiny_layers())
    s3_server.upload_dir(tmp_path, s3_bucket, "m")
    source = open_source(f"s3://{s3_bucket}/m/{path.name}", SETTINGS)
    with pytest.raises(NoWeightsError, match=rf"is named like a file.*s3://{s3_bucket}/m$"):
        open_checkpoint(source, SETTINGS)
    source.close()


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError, match="nowhere"):
        open_checkpoint(LocalSource(tmp_path / "nowhere"), SETTINGS)


def test_shard_that_vanishes_between_listing_and_reading(tmp_path: Path) -> None:
    paths = write_checkpoint(tmp_path, tiny_layers(), shards=3)

    class Vanishing(LocalSource):
        def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
            listed = super().list(recursive=recursive)
            paths[1].unlink()
            return listed

    with pytest.raises(ObjectChangedError, match=paths[1].name):
        open_checkpoint(Vanishing(tmp_path), SETTINGS)


def test_source_that_answers_short_is_not_believed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_layers())

    class Short(LocalSource):
        def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
            return super().read(object_id, byte_range)[:-1]

    with pytest.raises(RangeMismatchError, match="got"):
        open_checkpoint(Short(tmp_path), SETTINGS)


def test_checkpoint_is_the_same_from_a_copy(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", tiny_layers(), shards=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, two = (open_checkpoint(LocalSource(tmp_path / d), SETTINGS) for d in "ab")
    assert [(e.name, e.byte_range) for e in one.entries.values()] == [
        (e.name, e.byte_range) for e in two.entries.values()
    ]
