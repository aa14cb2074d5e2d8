"""The cache's directory: whom it trusts, how full it may be, what goes first."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.clock import SystemClock
from fastload_common.range_cache import place
from fastload_common.range_cache.entry import Entry, Identity
from fastload_common.range_cache.place import CacheDirectory, FullError, UnfitError, directory_of
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.units import MIB

NOW_S = 1_700_000_000.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def opened(root: Path, max_bytes: int | None = None) -> CacheDirectory:
    directory = CacheDirectory(root, max_bytes, SystemClock())
    directory.open()
    return directory


def fill(root: Path, name: str, size_bytes: int, used_at_s: float = NOW_S) -> Entry:
    """An entry that is still open: in use."""
    identity = Identity("", ObjectId(f"s3://b/{name}", '"e"', size_bytes))
    entry = Entry(directory_of(root), identity, writable=True)
    assert entry.open(create=True)
    entry.write(ByteRange(0, size_bytes), memoryview(bytearray(b"x") * size_bytes))
    os.utime(entry.path(".data"), (used_at_s, used_at_s))
    return entry


def keys(root: Path) -> set[str]:
    return {path.stem for path in directory_of(root).iterdir()}


def test_it_is_for_this_user_alone(root: Path) -> None:
    directory = opened(root)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.why_not_writable == ""
    opened(root)  # another process finds it


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    opened(root).path.chmod(mode)
    with pytest.raises(UnfitError, match="can be written by others"):
        opened(root)


def test_one_that_others_can_replace_is_refused(root: Path) -> None:
    opened(root)
    root.chmod(0o777)
    with pytest.raises(UnfitError, match="can be replaced"):
        opened(root)
    root.chmod(0o1777)
    opened(root)


def test_links_and_files_are_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    directory_of(root).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnfitError, match="is a link"):
        opened(root)
    with pytest.raises(UnfitError, match="is no directory"):
        opened(tmp_path / "missing")
    directory_of(root).unlink()
    directory_of(root).touch()
    with pytest.raises(UnfitError):
        opened(root)


def test_one_on_another_machine_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "is_network_mount", lambda path: True)
    with pytest.raises(UnfitError, match="another machine"):
        opened(root)


def test_what_root_has_filled_may_be_read_by_others(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(root)
    directory.path.chmod(0o755)
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK)
    again = opened(root)
    assert "belongs to another user" in again.why_not_writable


def test_the_least_recently_used_goes_first(root: Path) -> None:
    directory = opened(root, 10 * MIB)
    entries = [fill(root, f"{k}", 3 * MIB, NOW_S + k) for k in (2, 0, 1)]
    for entry in entries:
        entry.close()
    assert [row.used_at_s - NOW_S for row in directory.rows()] == [0, 1, 2]
    directory.require_room(3 * MIB)
    assert keys(root) == {entries[0].key, entries[2].key}
    assert not list(directory_of(root).glob(entries[1].key + "*"))


def test_reading_an_entry_makes_it_recent(root: Path) -> None:
    directory = opened(root, 10 * MIB)
    old, new = fill(root, "old", 3 * MIB, NOW_S - 9), fill(root, "new", 3 * MIB, NOW_S)
    for entry in (old, new):
        entry.close()
    old = Entry(directory.path, old.identity, writable=True)
    assert old.open()
    old.close()
    assert [row.key for row in directory.rows()] == [new.key, old.key]


def test_what_is_in_use_stays(root: Path) -> None:
    directory = opened(root, 10 * MIB)
    entries = [fill(root, f"{k}", 3 * MIB, NOW_S + k) for k in range(3)]
    with pytest.raises(FullError, match=r"entries in use take 9\.\d+ MiB of 10\.0 MiB"):
        directory.require_room(3 * MIB)
    assert len(keys(root)) == 3
    entries[2].close()
    directory.require_room(3 * MIB)
    assert keys(root) == {entries[0].key, entries[1].key}
    for entry in entries:
        entry.close()


def test_times_that_lie_ahead_say_nothing(root: Path) -> None:
    """A clock that was years ahead must not keep its entries for years."""
    clock = FakeClock()
    directory = CacheDirectory(root, 10 * MIB, clock)
    directory.open()
    ahead = fill(root, "ahead", 3 * MIB, clock.wall_s() + 1e8)
    good = fill(root, "good", 3 * MIB, clock.wall_s() - 5)
    for entry in (ahead, good):
        entry.close()
    assert [row.key for row in directory.rows()] == [ahead.key, good.key]


def test_what_others_write_counts_too(root: Path) -> None:
    one, other = opened(root, 64 * MIB), opened(root, 64 * MIB)
    for k in range(20):
        one.require_room(3 * MIB)
        fill(root, f"one{k}", 3 * MIB, NOW_S + k).close()
        other.require_room(3 * MIB)
        fill(root, f"other{k}", 3 * MIB, NOW_S + k).close()
    # Each may be a step, 1 MiB here, and its last entry beyond what it knew.
    assert sum(row.size_bytes for row in one.rows()) <= 64 * MIB + 2 * 4 * MIB


class Disk:
    """What `os.statvfs` says."""

    f_frsize = 4096
    f_flag = 0

    def __init__(self, total_bytes: int, free_bytes: int) -> None:
        self.f_blocks, self.f_bavail = total_bytes // 4096, free_bytes // 4096


@pytest.mark.parametrize(("bound", "free_mib"), [(None, 150), (None, 145), (900 * MIB, 21)])
def test_a_share_of_the_disk_stays_free(
    root: Path, bound: int | None, free_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = opened(root, bound)
    monkeypatch.setattr(os, "statvfs", lambda path: Disk(1000 * MIB, free_mib * MIB))
    with pytest.raises(FullError, match=rf"{free_mib}\.0 MiB of the disk are free"):
        directory.require_room(2 * MIB)
    monkeypatch.setattr(os, "statvfs", lambda path: Disk(10_000 * MIB, 5000 * MIB))
    directory.require_room(2 * MIB)


def test_one_process_removes_at_a_time(root: Path) -> None:
    directory = opened(root, 5 * MIB)
    entry = fill(root, "old", 3 * MIB)
    entry.close()
    lock = os.open(directory.path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FullError):
            directory.require_room(3 * MIB)
        assert keys(root) == {entry.key}
    finally:
        os.close(lock)
    directory.require_room(3 * MIB)
    assert keys(root) == set()


def test_an_entry_that_was_removed_meanwhile_is_made_anew(root: Path) -> None:
    opened(root)
    entry = fill(root, "k", 3 * MIB)
    entry.remove()
    again = fill(root, "k", 3 * MIB)
    assert again.coverage.held_bytes == 3 * MIB
    for one in (entry, again):
        one.close()


@pytest.fixture
def busy() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_openers_and_removers_in_a_race_never_lose_an_entry_in_use(
    root: Path, busy: threading.Event
) -> None:
    directory = opened(root, 1 * MIB)

    def remove() -> None:
        while not busy.is_set():
            directory.collect(0)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(150):
            identity = Identity("", ObjectId("s3://b/k", '"e"', 10))
            entry = Entry(directory.path, identity, writable=True)
            if not entry.open(create=True):
                continue  # it was just being removed
            entry.write(ByteRange(0, 10), memoryview(b"0123456789"))
            assert entry.path(".data").exists()
            again = Entry(directory.path, identity, writable=False)
            assert again.open()
            assert again.coverage.held_bytes == 10
            again.close()
            entry.close()
    finally:
        busy.set()
        remover.join(10)
