"""URIs and the registry: what an operator writes, and what object URIs look like."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.config import Settings
from fastload_common.errors import ConfigError
from fastload_common.source.local import LocalSource
from fastload_common.source.registry import open_source
from fastload_common.source.s3 import S3Source
from fastload_common.source.uri import S3Location, file_path, file_uri, parse_root, s3_location


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b", "bucket", "a/b"),
        ("s3://bucket/a/b//", "bucket", "a/b"),
        ("S3://bucket/a", "bucket", "a"),
        ("s3://bucket//a", "bucket", "/a"),
        ("s3://bucket/a b/c?d#e%2F", "bucket", "a b/c?d#e%2F"),
        ("s3://models.prod.example/x", "models.prod.example", "x"),
    ],
)
def test_s3_uris_are_taken_literally(uri: str, bucket: str, prefix: str) -> None:
    location = parse_root(uri)
    assert location == S3Location(bucket, prefix)
    assert s3_location(S3Location(bucket, prefix).uri) == location


def test_registry_chooses_by_scheme(tmp_path: Path) -> None:
    assert isinstance(open_source("s3://bucket/x", Settings()), S3Source)
    for uri in (str(tmp_path), tmp_path.as_uri(), f"file://localhost{tmp_path}"):
        source = open_source(uri, Settings())
        assert isinstance(source, LocalSource)
        assert source.root == f"file://{tmp_path}"


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse_root("model") == tmp_path / "model"
    assert parse_root("./a/../model/") == tmp_path / "model"
    assert parse_root("~/model") == tmp_path / "home" / "model"
    # No scheme, so a path, whatever its characters.
    assert parse_root("org/model:v1") == tmp_path / "org" / "model:v1"
    assert parse_root("file:///a%20b/c") == Path("/a b/c")


@pytest.mark.parametrize("uri", ["/", "//", "/..", "file:///", "file:////"])
def test_the_whole_machine_is_no_model(uri: str) -> None:
    with pytest.raises(ConfigError, match="refusing the root"):
        open_source(uri, Settings())


@pytest.mark.parametrize("uri", ["", "  "])
def test_empty(uri: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        open_source(uri, Settings())


@pytest.mark.parametrize("uri", ["s3://", "s3:///key"])
def test_no_bucket(uri: str) -> None:
    with pytest.raises(ConfigError, match="no bucket"):
        open_source(uri, Settings())


@pytest.mark.parametrize("uri", ["file://host/dir", "file://relative", "file://"])
def test_file_uri_of_another_host(uri: str) -> None:
    with pytest.raises(ConfigError, match="file URI of this host"):
        open_source(uri, Settings())


@pytest.mark.parametrize("scheme", ["gs", "az", "hf", "https", "s3a"])
def test_unknown_scheme_names_the_known_ones(scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_source(f"{scheme}://bucket/x", Settings())
    for known in ("s3://", "file://", "path"):
        assert known in str(caught.value)
    assert ("did you mean s3://" in str(caught.value)) == (scheme == "s3a")


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4))
def test_file_uris_give_the_path_back(parts: list[bytes]) -> None:
    import os

    names = [os.fsdecode(part.replace(b"/", b"_").replace(b"\0", b"_")) for part in parts]
    path = Path("/", *(name for name in names if name not in (".", "..")))
    assert file_path(file_uri(path)) == path
    assert file_uri(path).isascii()
