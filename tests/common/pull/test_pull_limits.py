"""What a disk or a file system does not take: each error names layer and entry."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError, PullError
from fastload_common.pull import pull as pulling
from fastload_common.pull.placing import check_names
from fastload_common.pull.records import FileItem, LayerItem, PullPlan
from fastload_common.ranges import ObjectId
from fastload_common.source.local import LocalSource
from tests.common.pull.images import Blobs, Entry, archive, directory, file, link, symlink

KIB = 1 << 10
MIB = 1 << 20


def pull_tars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *tars: bytes, **settings: Any
) -> Path:
    blobs = Blobs(tmp_path / "blobs", settings=Settings(**settings))
    blobs.pull(monkeypatch, tmp_path / "new", tars, tars)
    return tmp_path / "new"


@pytest.mark.parametrize(
    "made",
    [
        lambda number: directory(f"d{number}/"),
        lambda number: file(f"f{number}", b"x"),
        lambda number: symlink(f"s{number}", "x" * 60),
        lambda number: file(f"i{number}/f", b""),
    ],
    ids=["directories", "files of a byte", "long links", "directories without entries"],
)
def test_blocks_of_the_disk_count_for_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[int], Entry]
) -> None:
    tar = archive(*(made(number) for number in range(300)))
    assert len(tar) < 400 * KIB
    with pytest.raises(ArchiveUnsafeError, match="unpack to"):
        pull_tars(tmp_path, monkeypatch, tar, max_unpacked_bytes=MIB)
    pull_tars(tmp_path, monkeypatch, tar, max_unpacked_bytes=2 * MIB)


def test_links_and_empty_files_take_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [file("f", b"x")]
    for number in range(200):
        entries += [file(f"e{number}", b""), link(f"l{number}", "f"), symlink(f"s{number}", "f")]
    pull_tars(tmp_path, monkeypatch, archive(*entries), max_unpacked_bytes=MIB)


def test_blocks_of_a_layer_that_was_unpacked_before_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = [
        archive(*(directory(f"{n}-{number}/") for number in range(150))) for n in ("a", "b", "c")
    ]
    for _ in range(3):
        with pytest.raises(ArchiveUnsafeError, match="unpack to"):
            pull_tars(tmp_path, monkeypatch, *tars, max_unpacked_bytes=MIB)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_an_attribute_that_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pax = {"SCHILY.xattr.user.big": "x" * (65 * KIB)}
    tar = archive(file("it", pax=pax) if kind == "file" else directory("it/", pax=pax))
    with pytest.raises(ArchiveInvalidError, match=r"'it'.*'user.big' of 66560 bytes") as caught:
        pull_tars(tmp_path, monkeypatch, tar)
    assert "/0-" in caught.value.fields["layer"]


@pytest.mark.parametrize("late", [False, True], ids=["within a layer", "to a layer below"])
def test_too_many_hard_links_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    tars = [archive(file("f")), archive(link("l", "f"))]
    if not late:
        tars = [archive(file("f"), link("l", "f"))]

    def full(*names: Any, **more: Any) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(ArchiveInvalidError, match=r"'l' cannot be made: .* no more hard links"):
        pull_tars(tmp_path, monkeypatch, *tars)


def test_a_name_that_the_file_system_does_not_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def mkdir(name: Any, *mode: Any, **more: Any) -> None:
        if name == b"long":
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        real(name, *mode, **more)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(ArchiveInvalidError, match="'long/' cannot be made: its name is too long"):
        pull_tars(tmp_path, monkeypatch, archive(directory("long/")))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", "b/c", "a"], "'a' cannot be made: two objects have this name"),
        (["a//b", "a/b"], "'a/b' cannot be made: two objects have this name"),
        (["a/b/c", "a!", "a"], "'a' cannot be made: it is an object, and 'a/b/c' lies below it"),
        (["d/long-long-long"], "'d/long-long-long' is too long for this file system"),
    ],
)
def test_names_that_clash_are_known_beforehand(names: list[str], text: str) -> None:
    with pytest.raises(ArchiveInvalidError, match=text):
        check_names(names, 10)
    check_names(["a!", "a/b", "a/c", "ab", "a-/b"], 10)


@pytest.mark.parametrize("clash", [True, False])
def test_nothing_is_fetched_of_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clash: bool
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "x").write_bytes(b"x" * 1000)
    source = LocalSource(tmp_path / "from")
    one = source.stat("x")
    if clash:
        plan = PullPlan("test", [FileItem(one, "a"), FileItem(one, "a//b")])
    else:
        plan = PullPlan("test", (), [LayerItem(ObjectId(one.uri, one.etag, 1 << 62), 0)])

    def opened(uri: str, settings: Settings, clock: Clock) -> tuple[Any, PullPlan]:
        return source, plan

    monkeypatch.setattr(pulling, "open_plan", opened)
    came: list[int] = []
    text = "'a/b' lies below it" if clash else "from/x is said to have"
    with pytest.raises(PullError, match=text):
        pulling.pull("test", tmp_path / "new", Settings(), advance=came.append)
    assert came == []
