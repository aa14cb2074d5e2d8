"""Opening checkpoints in directories and on the real S3 server, request by request."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

from fastload_common.checkpoint.records import Checkpoint
from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    CheckpointError,
    HeaderInvalidError,
    NoWeightsError,
    ObjectChangedError,
    ObjectMissingError,
    RangeMismatchError,
    ShardMissingError,
    ShardTruncatedError,
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
    write_checkpoint,
    write_index,
)
from fastload_common.testing.s3_server import S3Server

SETTINGS = Settings()

Reads = list[tuple[int, int]]


class Recorder(LocalSource):
    """A directory that notes its requests and can refuse listing."""

    def __init__(self, directory: Path, *, may_list: bool = True) -> None:
        super().__init__(directory)
        self.may_list = may_list
        self.reads: list[tuple[str, int, int]] = []
        self.lists: list[bool] = []
        self.denied: set[str] = set()

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        self.lists.append(recursive)
        if not self.may_list:
            raise AccessDeniedError("listing is not allowed", uri=self.root)
        return super().list(recursive=recursive)

    def stat(self, key: str) -> ObjectId:
        if key in self.denied:
            raise AccessDeniedError("no", uri=f"{self.root}/{key}")
        return super().stat(key)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        whole = byte_range or ByteRange(0, object_id.size_bytes)
        assert whole.size_bytes > 0
        self.reads.append((object_id.uri.rsplit("/", 1)[1], whole.start, whole.end))
        return super().read(object_id, byte_range)

    def reads_of(self, file: str) -> Reads:
        return [(start, end) for name, start, end in self.reads if name == file]


def layers(count: int = 8) -> dict[str, TensorSpec]:
    return {
        f"model.layers.{i}.{part}": random_tensor(dtype, shape, seed=i)
        for i in range(count)
        for part, dtype, shape in (
            ("q_proj.weight", "BF16", [4, 6]),
            ("q_proj.input_scale", "F32", []),
            ("nothing", "F16", [0, 3]),
            ("odd", "U8", [3]),
        )
    }


def read_tensors(source: ObjectSource, checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """The checkpoint's bytes; a tensor without elements is never asked for."""
    return {
        name: TensorSpec(
            entry.dtype,
            entry.shape,
            source.read(entry.object_id, entry.byte_range) if entry.byte_range.size_bytes else b"",
        )
        for name, entry in checkpoint.entries.items()
    }


MakeSource = Callable[[Path], ObjectSource]


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> str:
    """One bucket for this module: the server's room for buckets is small."""
    name = f"b-{uuid.uuid4().hex[:16]}"
    s3_server.make_bucket(name)
    return name


def use_server(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def make_source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeSource]:
    """From a directory to a source with its files: the directory, or a real server's prefix."""
    opened: list[ObjectSource] = []

    def make(directory: Path) -> ObjectSource:
        uri = str(directory)
        if request.param == "s3":
            server = request.getfixturevalue("s3_server")
            use_server(server, monkeypatch)
            prefix = f"{uuid.uuid4().hex}/model"
            server.upload_dir(directory, request.getfixturevalue("bucket"), prefix)
            uri = f"s3://{request.getfixturevalue('bucket')}/{prefix}"
        opened.append(open_source(uri, SETTINGS))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


# What is there is found, byte for byte


@pytest.mark.parametrize("shards", [1, 3])
def test_bytes_equal_the_reference(tmp_path: Path, make_source: MakeSource, shards: int) -> None:
    tensors = layers()
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
    tensors = {**layers(), "big": random_tensor("U8", [1_000_000])}
    write_checkpoint(tmp_path, tensors, shards=3)
    source = Recorder(tmp_path)
    open_checkpoint(source, SETTINGS)
    assert source.lists == [False]
    assert len(source.reads) == 4  # the index and three shards
    (only,) = source.reads_of("model-00003-of-00003.safetensors")
    assert only == (0, 128 * 1024)


def test_long_header_takes_a_second_request_for_the_rest_only(tmp_path: Path) -> None:
    tensors = {f"{'n' * 200}.{i}": random_tensor("U8", [1], seed=i) for i in range(2000)}
    (path,) = write_checkpoint(tmp_path, tensors)
    source = Recorder(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    header_bytes = checkpoint.shards[0].header_bytes
    assert header_bytes > 128 * 1024
    assert source.reads_of(path.name) == [(0, 128 * 1024), (128 * 1024, header_bytes)]


def test_index_tells_how_long_headers_are(tmp_path: Path) -> None:
    tensors = {f"{'n' * 200}.{i}": random_tensor("U8", [1], seed=i) for i in range(4000)}
    paths = write_checkpoint(tmp_path, tensors, shards=2)
    source = Recorder(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    for path, shard in zip(paths, checkpoint.shards, strict=True):
        ((start, end),) = source.reads_of(path.name)
        assert start == 0
        assert end >= shard.header_bytes


@pytest.mark.parametrize("threads", [1, 7])
def test_order_does_not_depend_on_threads(tmp_path: Path, threads: int) -> None:
    write_checkpoint(tmp_path, layers(40), shards=12)
    one = open_checkpoint(LocalSource(tmp_path), SETTINGS, threads=threads)
    assert list(one.entries) == list(layers(40))


def test_phases_are_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers())
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
    paths = write_checkpoint(tmp_path, layers(100), shards=4)
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
    paths = write_checkpoint(tmp_path, layers(), shards=5)
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
    tensors = layers()
    write_checkpoint(tmp_path, tensors, shards=4)
    source = Recorder(tmp_path, may_list=False)
    checkpoint = open_checkpoint(source, SETTINGS)
    assert read_tensors(LocalSource(tmp_path), checkpoint) == tensors


@pytest.mark.parametrize("answer", ["missing", "denied"])
def test_f10_without_listing_missing_shards_are_named(tmp_path: Path, answer: str) -> None:
    paths = write_checkpoint(tmp_path, layers(), shards=4)
    source = Recorder(tmp_path, may_list=False)
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
    tensors = layers()
    write_checkpoint(tmp_path, tensors, stem=stem)
    source = Recorder(tmp_path, may_list=False)
    prefer = {"model": "hf", "consolidated": "mistral"}[stem]
    assert list(open_checkpoint(source, SETTINGS, prefer=prefer).entries) == list(tensors)
    assert list(open_checkpoint(source, SETTINGS, prefer="auto").entries) == list(tensors)


def test_without_listing_and_with_nothing_the_denial_is_told(tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match="listing is not allowed") as caught:
        open_checkpoint(Recorder(tmp_path, may_list=False), SETTINGS)
    assert "model.safetensors" in caught.value.__notes__[0]


# F11, F12, F13, F14: which files, which copies


def test_f11_files_that_are_not_listed_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = layers()
    write_checkpoint(
        tmp_path, {n: random_tensor("U8", [5]) for n in tensors}, shards=2, index=False
    )
    write_checkpoint(tmp_path, tensors, shards=4)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not even a file")
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02.")
    source = Recorder(tmp_path)
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
    hf = layers()
    mistral = {f"m.{name}": spec for name, spec in hf.items()}
    write_checkpoint(tmp_path, hf, shards=3)
    write_checkpoint(tmp_path, mistral, shards=2, stem="consolidated")
    (tmp_path / "params.json").write_text("{}")
    source = Recorder(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS, prefer=prefer)
    wanted = {"hf": hf, "mistral": mistral}[prefer]
    assert read_tensors(LocalSource(tmp_path), checkpoint) == wanted
    stem = {"hf": "model", "mistral": "consolidated"}[prefer]
    assert {name.partition("-")[0].partition(".")[0] for name, _, _ in source.reads} == {stem}


def test_f14_folders_are_not_even_listed(tmp_path: Path, make_source: MakeSource) -> None:
    tensors = layers()
    write_checkpoint(tmp_path, tensors)
    for folder in ("original", "checkpoint-500", "a/b"):
        write_checkpoint(tmp_path / folder, {n: random_tensor("U8", [5]) for n in tensors})
    (tmp_path / "README.md").write_text("x")
    source = make_source(tmp_path)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors
    recorder = Recorder(tmp_path)
    open_checkpoint(recorder, SETTINGS)
    assert recorder.lists == [False]


def test_patterns_may_name_a_folder(tmp_path: Path, make_source: MakeSource) -> None:
    write_checkpoint(tmp_path, layers())
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
    tensors = layers()
    snapshot = hub_cache(tmp_path / "models--a--b", tensors)
    source = LocalSource(snapshot)
    assert read_tensors(source, open_checkpoint(source, SETTINGS)) == tensors


def test_f21_outer_folder_gives_the_hint(tmp_path: Path, make_source: MakeSource) -> None:
    hub_cache(tmp_path, layers())
    with pytest.raises(NoWeightsError, match="hub cache; use .*/snapshots/" + "c" * 40):
        open_checkpoint(make_source(tmp_path), SETTINGS)


def test_f21_link_that_leads_nowhere(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, layers())
    (tmp_path / "blobs" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ShardMissingError, match="links lead nowhere, such as model-00002-of-00002"):
        open_checkpoint(LocalSource(snapshot), SETTINGS)


def test_f21_two_names_of_one_file_are_not_compared(tmp_path: Path) -> None:
    tensors = layers()
    (path,) = write_checkpoint(tmp_path, tensors)
    (tmp_path / "again.safetensors").symlink_to(path.name)
    source = Recorder(tmp_path)
    checkpoint = open_checkpoint(source, SETTINGS)
    assert list(checkpoint.entries) == list(tensors)
    assert len(source.reads) == 2


# Other bad input


def test_tensor_that_its_file_lacks(tmp_path: Path, make_source: MakeSource) -> None:
    write_checkpoint(tmp_path, layers(), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(TensorMissingError, match=r"extra\.weight"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_wrong_index(tmp_path: Path, make_source: MakeSource, text: str) -> None:
    write_checkpoint(tmp_path, layers(), shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


def test_pickles_only(tmp_path: Path, make_source: MakeSource) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoWeightsError, match=r"pytorch_model\.bin"):
        open_checkpoint(make_source(tmp_path), SETTINGS)


@pytest.mark.s3
def test_nothing_under_the_prefix(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(s3_server, monkeypatch)
    source = open_source(f"s3://{bucket}/nothing", SETTINGS)
    with pytest.raises(NoWeightsError, match=f"s3://{bucket}/nothing: nothing stands there"):
        open_checkpoint(source, SETTINGS)
    source.close()


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError, match="nowhere"):
        open_checkpoint(LocalSource(tmp_path / "nowhere"), SETTINGS)


def test_shard_that_vanishes_between_listing_and_reading(tmp_path: Path) -> None:
    paths = write_checkpoint(tmp_path, layers(), shards=3)

    class Vanishing(LocalSource):
        def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
            listed = super().list(recursive=recursive)
            paths[1].unlink()
            return listed

    with pytest.raises(ObjectChangedError, match=paths[1].name):
        open_checkpoint(Vanishing(tmp_path), SETTINGS)


def test_source_that_answers_short_is_not_believed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers())

    class Short(LocalSource):
        def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
            return super().read(object_id, byte_range)[:-1]

    with pytest.raises(RangeMismatchError, match="got"):
        open_checkpoint(Short(tmp_path), SETTINGS)


def test_checkpoint_is_the_same_from_a_copy(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", layers(), shards=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, two = (open_checkpoint(LocalSource(tmp_path / d), SETTINGS) for d in "ab")
    assert [(e.name, e.byte_range) for e in one.entries.values()] == [
        (e.name, e.byte_range) for e in two.entries.values()
    ]
