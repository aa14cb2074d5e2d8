"""What is pulled from S3, from directories and from artifacts that are no images."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.cli.main import main
from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.errors import (
    ArchiveInvalidError,
    ArchiveUnsafeError,
    ChecksumMismatchError,
    ConfigError,
    ObjectMissingError,
    PullError,
)
from fastload_common.pull.plans import open_plan
from fastload_common.pull.pull import pull
from fastload_common.source.registry import open_source
from fastload_common.testing.fault_server import Fault, FaultServer
from fastload_common.testing.scripted_registry import Answer, Asked, ScriptedRegistry
from tests.common.pull.images import archive, compressed, directory, file, sha256, tree_of

RAW = "application/vnd.cncf.model.weight.v1.raw"
TAR = "application/vnd.oci.image.layer.v1.tar"
TITLE = "org.opencontainers.image.title"
DATA = random.Random(1).randbytes(3_000_000)


@pytest.mark.s3
def test_everything_under_a_prefix_becomes_files(s3_bucket: str, tmp_path: Path) -> None:
    objects = {"config.json": b"{}", "deep/er/model.safetensors": DATA, "empty": b""}
    with contextlib.closing(open_source(f"s3://{s3_bucket}/m", Settings())) as source:
        for key, data in (objects | {"original/not-wanted": b"x"}).items():
            source.put_if_absent(key, data)
    report = pull(f"s3://{s3_bucket}/m", tmp_path / "new", Settings())
    assert (tmp_path / "new/deep/er/model.safetensors").read_bytes() == DATA
    assert set(tree_of(tmp_path / "new")) == {
        ".",
        "config.json",
        "deep",
        "deep/er",
        "deep/er/model.safetensors",
        "empty",
    }
    assert report.files == 3
    assert report.fetched_bytes == report.size_bytes == len(DATA) + 2
    modes = {oct((tmp_path / "new" / name).stat().st_mode & 0o777) for name in ("empty", "deep")}
    assert modes == {"0o644", "0o755"}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRegistry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with ScriptedRegistry() as running:
        monkeypatch.setenv("FASTLOAD_OCI_PLAIN_HTTP", running.host)
        yield running


def uri(registry: ScriptedRegistry, folder: str = "") -> str:
    return f"oci://{registry.host}/m:v{folder}"


def test_an_archive_without_its_last_padding_is_whole(
    registry: ScriptedRegistry, tmp_path: Path
) -> None:
    """As `umoci insert` writes it."""
    data = archive(file("a", b"x" * 700), file("b", b"y" * 100))
    end = data.index(b"y" * 100) + 100
    registry.artifact("v", [registry.put(data[:end], TAR)])
    settings = Settings(oci_plain_http=(registry.host,))
    pull(uri(registry), tmp_path / "new", settings)
    assert (tmp_path / "new/b").read_bytes() == b"y" * 100
    registry.artifact("v", [registry.put(data[: end - 1], TAR)])
    with pytest.raises(ArchiveInvalidError, match="1 bytes missing"):
        pull(uri(registry), tmp_path / "cut", settings)


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_mirror_that_ends_in_the_middle_ends_no_pull(
    registry: ScriptedRegistry,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    has_ranges: bool,
) -> None:
    with ScriptedRegistry() as mirror:
        for one in (mirror, registry):
            one.artifact("v", [one.put(DATA, RAW, {TITLE: "model.safetensors"})])
            one.honours_ranges = has_ranges
        served = []

        def end(asked: Asked) -> Answer | None:
            if "/blobs/" not in asked.path:
                return None
            served.append(asked)
            usual = mirror.usual(asked)
            is_over = len(served) > 1
            return Answer(usual.status, usual.body, usual.headers, cut_bytes=0) if is_over else None

        mirror.script = end
        mirrors = (f"{registry.host}={mirror.host}",)
        hosts = (registry.host, mirror.host)
        pull(uri(registry), tmp_path / "new", Settings(oci_mirrors=mirrors, oci_plain_http=hosts))
    assert (tmp_path / "new/model.safetensors").read_bytes() == DATA
    assert registry.count("/blobs/")
    assert sum("the mirror" in one for one in caplog.messages) == 1


@pytest.mark.parametrize("how", ["raw", "gzip"])
def test_a_mirror_that_sends_other_bytes_is_left(
    registry: ScriptedRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    tar = archive(file("model.safetensors", DATA))
    blob, media = (DATA, RAW) if how == "raw" else (compressed(tar, "gzip"), TAR + "+gzip")
    with ScriptedRegistry() as mirror:
        for one in (mirror, registry):
            one.artifact("v", [one.put(blob, media, {TITLE: "model.safetensors"})])
        other = blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:]
        mirror.blobs = {
            digest: other if data == blob else data for digest, data in mirror.blobs.items()
        }
        hosts = (registry.host, mirror.host)
        mirrors = (f"{registry.host}={mirror.host}",)
        pull(uri(registry), tmp_path / "new", Settings(oci_mirrors=mirrors, oci_plain_http=hosts))
        assert (tmp_path / "new/model.safetensors").read_bytes() == DATA
        [said] = [one for one in caplog.messages if "is not read from the mirror" in one]
        assert mirror.host in said
        registry.blobs = mirror.blobs
        with pytest.raises(ChecksumMismatchError) as caught:
            pull(uri(registry), tmp_path / "b", Settings(oci_mirrors=mirrors, oci_plain_http=hosts))
    assert registry.host in str(caught.value.fields["endpoint"])


@pytest.mark.parametrize("mode", [0o777, 0o000, 0o4755, 0o750])
def test_an_artifact_does_not_give_the_destination_away(
    registry: ScriptedRegistry, tmp_path: Path, mode: int
) -> None:
    entries = [directory("./", mode, uid=4242), directory("./deep", 0o777), file("deep/a", b"x")]
    registry.artifact("v", [registry.put(compressed(archive(*entries), "gzip"), TAR + "+gzip")])
    settings = Settings(oci_plain_http=(registry.host,))
    pull(uri(registry), tmp_path / "new", settings, special="drop")
    status = (tmp_path / "new").stat()
    assert status.st_uid == os.geteuid()
    assert oct(status.st_mode & 0o7777) == oct((mode & 0o755) | 0o700)
    assert (tmp_path / "new/deep").stat().st_mode & 0o777 == 0o777


def test_an_artifact_of_files_and_archives(
    registry: ScriptedRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = archive(directory("tokenizer/"), file("tokenizer/vocab.json", b"{}"))
    registry.artifact(
        "v",
        [
            registry.put(DATA, RAW, {TITLE: "model.safetensors"}),
            registry.put(DATA, RAW, {TITLE: "copies/again.safetensors"}),
            registry.put(
                compressed(tar, "gzip"),
                f"{TAR}+gzip",
                {TITLE: "tokenizer", "io.deis.oras.content.digest": sha256(tar)},
            ),
            registry.put(b"{}", "application/vnd.oci.empty.v1+json"),
        ],
    )
    assert main(["pull", uri(registry), str(tmp_path / "new"), "--json"]) == 0
    assert '"compared": 3' in capsys.readouterr().out
    assert (tmp_path / "new/model.safetensors").read_bytes() == DATA
    assert (tmp_path / "new/copies/again.safetensors").read_bytes() == DATA
    assert (tmp_path / "new/copies/again.safetensors").stat().st_nlink == 1
    assert (tmp_path / "new/tokenizer/vocab.json").read_bytes() == b"{}"
    # Bytes with two names are fetched once.
    assert sum(len(data) for data in registry.blobs.values()) < 2 * len(DATA)


def test_a_folder_of_an_artifact(registry: ScriptedRegistry, tmp_path: Path) -> None:
    layers = [
        registry.put(b"one", RAW, {TITLE: "a/one"}),
        registry.put(b"two", RAW, {TITLE: "b/two"}),
    ]
    registry.artifact("v", layers)
    pull(uri(registry, "/b"), tmp_path / "new", Settings(oci_plain_http=(registry.host,)))
    assert set(tree_of(tmp_path / "new")) == {".", "two"}


def test_an_artifact_is_no_image(registry: ScriptedRegistry) -> None:
    registry.artifact("v", [registry.put(archive(file("x")), TAR)])
    settings = Settings(oci_plain_http=(registry.host,))
    source, plan = open_plan(uri(registry), settings, SystemClock())
    source.close()
    assert not plan.is_image
    assert plan.layers[0].diff_id is None
    assert plan.uri.startswith(f"oci://{registry.host}/m:v@sha256:")


def test_a_file_and_an_archive_of_one_name_are_an_error(
    registry: ScriptedRegistry, tmp_path: Path
) -> None:
    layers = [
        registry.put(archive(file("x", b"1")), TAR),
        registry.put(b"2", RAW, {TITLE: "x"}),
    ]
    registry.artifact("v", layers)
    with pytest.raises(ArchiveInvalidError, match="twice"):
        pull(uri(registry), tmp_path / "new", Settings(oci_plain_http=(registry.host,)))
    assert not (tmp_path / "new").exists()


def test_a_compression_that_is_not_supported_is_said(
    registry: ScriptedRegistry, tmp_path: Path
) -> None:
    registry.artifact("v", [registry.put(b"BZh9", f"{TAR}+bzip2")])
    with pytest.raises(PullError, match="not supported"):
        pull(uri(registry), tmp_path / "new", Settings(oci_plain_http=(registry.host,)))


def test_names_of_objects_cannot_lead_out(tmp_path: Path, fault_server: FaultServer) -> None:
    server = fault_server
    server.put("b", "m/../../evil", b"evil")
    with pytest.raises((ArchiveUnsafeError, ObjectMissingError)):
        pull("s3://b/m", tmp_path / "new", Settings())
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "new").exists()


def test_a_key_below_another_key_is_an_error(tmp_path: Path, fault_server: FaultServer) -> None:
    server = fault_server
    server.put("b", "m/x", b"1")
    server.put("b", "m/x/y", b"2")
    with pytest.raises(ArchiveInvalidError, match=r"'x' cannot be made: .*'x/y' lies below it"):
        pull("s3://b/m", tmp_path / "new", Settings())


@pytest.mark.parametrize("verify", ["off", "covered"])
def test_the_checksum_that_s3_keeps_is_compared_where_that_is_asked_for(
    tmp_path: Path, fault_server: FaultServer, verify: str
) -> None:
    headers = {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "FULL_OBJECT"}
    server = fault_server
    server.put("b", "m/x", DATA)
    server.script("HEAD", "b/m/x", [Fault(headers=headers)] * 3)
    if verify == "covered":
        with pytest.raises(ChecksumMismatchError, match="not what was stored"):
            pull("s3://b/m", tmp_path / "new", Settings(verify=verify))
        assert not (tmp_path / "new").exists()
    else:
        pull("s3://b/m", tmp_path / "new", Settings(verify=verify))


def test_nothing_to_pull_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ObjectMissingError, match="nothing to pull"):
        pull(str(tmp_path / "nothing"), tmp_path / "new", Settings())
    assert not [thread for thread in threading.enumerate() if "unpack" in thread.name]


def test_a_word_for_special_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "x", "y", "--special", "maybe"]) == 2
    assert ConfigError.__name__ in capsys.readouterr().err
