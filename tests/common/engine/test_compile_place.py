"""Directories of starts: one for each that lives, and nothing in it that was not whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import load_settings
from fastload_common.engine import compile_place
from fastload_common.engine.compile_directories import prepare_directories
from fastload_common.engine.compile_place import Place, see, take_place
from fastload_common.errors import ConfigError

NAME = "0123456789abcdef" * 2


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "compile"


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    for place in list(compile_place._held.values()):
        place.close()


def name_of(number: int) -> str:
    return f"{number:032x}"


def written(place: Place, name: str = "a/b", data: bytes = b"whole") -> Path:
    path = place.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_it_is_this_users_alone(parent: Path) -> None:
    place = take_place(parent, NAME)
    assert place.path == parent / NAME
    assert place.path.stat().st_mode & 0o777 == 0o700
    assert parent.stat().st_mode & 0o777 == 0o700


def test_living_starts_have_one_each(parent: Path) -> None:
    places = [take_place(parent, NAME) for _ in range(3)]
    assert [place.path.name for place in places] == [NAME, f"{NAME}-1", f"{NAME}-2"]
    places[1].close()
    assert take_place(parent, NAME).path.name == f"{NAME}-1"


def test_one_that_has_finished_is_shared_with_the_next_of_its_process(parent: Path) -> None:
    place = take_place(parent, NAME)
    kept = written(place)
    place.finish()
    again = take_place(parent, NAME)
    assert again is place
    assert kept.exists()
    assert take_place(parent, NAME).path.name == f"{NAME}-1", "that one has not finished"


def test_more_than_may_be(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_place, "_MOST", 2)
    take_place(parent, NAME)
    take_place(parent, NAME)
    with pytest.raises(OSError, match="as many starts as may be") as caught:
        take_place(parent, NAME)
    assert caught.value.errno == errno.EBUSY


# What is found again


def test_what_was_sealed_is_found_again_and_nothing_else(parent: Path, tmp_path: Path) -> None:
    place = take_place(parent, NAME)
    kept, changed = written(place), written(place, "a/changed")
    outside = written(Place(tmp_path / "mine", -1), "of/the/operator")
    place.seal(see([place.path, tmp_path / "mine"]))
    half = written(place, "a/later/half")
    top = written(place, "late")
    changed.write_bytes(b"more than it was")
    (place.path / "link").symlink_to(outside)
    (place.path / "a/directory").symlink_to(tmp_path / "mine")
    place.close()
    place = take_place(parent, NAME)
    assert kept.read_bytes() == b"whole"
    assert not changed.exists()
    assert not half.exists()
    assert not top.exists()
    assert sorted(path.name for path in place.path.rglob("*")) == ["a", "b", "later"]
    assert outside.read_bytes() == b"whole"


def test_a_change_of_the_same_length_is_seen(parent: Path) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    place.seal(see([place.path]))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
    place.close()
    take_place(parent, NAME)
    assert not path.exists()


@pytest.mark.parametrize("offset_s", [-(10**6), 10**6], ids=["past", "future"])
def test_clocks_that_are_wrong_do_no_harm(parent: Path, offset_s: int) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    time_s = path.stat().st_mtime + offset_s
    for each in (path, place.path):
        os.utime(each, (time_s, time_s))
    place.seal(see([place.path]))
    place.close()
    take_place(parent, NAME)
    assert path.exists()


def test_what_was_not_sealed_is_removed(parent: Path) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    (place.path / "link").symlink_to("/")
    place.close()
    place = take_place(parent, NAME)
    assert not path.exists()
    assert list(place.path.iterdir()) == []


def test_a_seal_is_good_for_one_start(parent: Path) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    place.seal(see([place.path]))
    place.close()
    take_place(parent, NAME).close()  # and dies before it has compiled
    take_place(parent, NAME)
    assert not path.exists()


def test_a_seal_from_before_the_machine_was_started_anew_is_not_trusted(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    place.seal(see([place.path]))
    place.close()
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(compile_place, "_BOOT", boot)
    take_place(parent, NAME)
    assert not path.exists()


@pytest.mark.parametrize(
    "seal", [b"", b"{", b"[]", b"\xff", b'{"boot": "', b'{"boot": "BOOT", "files": [1]}', b"null"]
)
def test_a_damaged_seal_is_none(parent: Path, seal: bytes) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    text = seal.replace(b"BOOT", compile_place._boot().encode())
    (place.path / ".whole").write_bytes(text)
    place.close()
    take_place(parent, NAME)
    assert not path.exists()


def test_a_seal_that_cannot_be_written_leaves_nothing(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = take_place(parent, NAME)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space"):
            place.seal({})
    assert list(place.path.iterdir()) == []


def test_a_directory_that_cannot_be_cleared_is_an_error_and_free_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = take_place(parent, NAME)
    written(place)
    place.close()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(PermissionError):
            take_place(parent, NAME)
    assert take_place(parent, NAME).path.name == NAME


def test_where_there_are_no_locks_no_directory_is_taken(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match="No locks"):
        take_place(parent, NAME)


def test_a_link_in_its_place_is_not_followed(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    parent.mkdir(mode=0o700)
    (parent / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        take_place(parent, NAME)


def test_a_directory_that_goes_between_two_calls_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody tidies up after it was opened and before it is locked."""
    real = fcntl.flock
    gone: list[Path] = []

    def flock(descriptor: int, *more: Any) -> None:
        if not gone:
            gone.append((parent / NAME).rename(parent / "away"))
        real(descriptor, *more)

    monkeypatch.setattr(fcntl, "flock", flock)
    place = take_place(parent, NAME)
    assert gone
    assert written(place).is_relative_to(parent / NAME)


# Tidying up


def test_the_least_recently_used_go_first_but_none_in_use(parent: Path) -> None:
    places = [take_place(parent, name_of(number)) for number in range(8)]
    for number, place in enumerate(places):
        os.utime(place.path, (number, number))
    for place in places[1:]:
        place.close()
    mine = take_place(parent, NAME)
    left = {path.name for path in parent.iterdir()}
    assert left == {mine.path.name, name_of(0), *map(name_of, (4, 5, 6, 7))}


def test_what_killed_ones_were_removing_is_removed(parent: Path) -> None:
    take_place(parent, NAME).close()
    (parent / ".gone-abc/x").mkdir(parents=True)
    (parent / "mine.txt").touch()
    take_place(parent, NAME)
    assert sorted(path.name for path in parent.iterdir()) == [NAME, "mine.txt"]


def test_the_seal_has_one_form(parent: Path) -> None:
    place = take_place(parent, NAME)
    path = written(place)
    place.seal(see([place.path]))
    found = json.loads((place.path / ".whole").read_text())
    assert found["files"] == {"a/b": [5, path.stat().st_mtime_ns]}


@pytest.mark.parametrize("made", ["a link", "writable by all"])
def test_no_directory_below_one_that_somebody_else_has_made_in_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    """Whoever can rename what is in there puts his own artefacts below the engine."""
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FASTLOAD_CACHE_DIR", raising=False)
    ours = tmp_path / "tmp" / f"fastload-{os.geteuid()}"
    (tmp_path / "his").mkdir()
    ours.parent.mkdir()
    if made == "a link":
        ours.symlink_to(tmp_path / "his")
    else:
        ours.mkdir()
        ours.chmod(0o777)
    with pytest.raises(ConfigError, match="no directory for compiled artefacts"):
        prepare_directories([], "a" * 64, load_settings())
    ours.unlink() if made == "a link" else ours.rmdir()
    assert prepare_directories([], "a" * 64, load_settings()).base.parent.parent == ours
    assert ours.stat().st_mode & 0o077 == 0
