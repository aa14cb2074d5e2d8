"""The directory of the cache: whether it may be trusted, how full it is, what goes first.

    <FASTLOAD_NODE_CACHE>/fastload-ranges-1/   0700, this user's
        <key>.data <key>.journal <key>.json    see `entry`

Whoever removes entries holds a lock on the directory itself: no file that somebody else could not
open. Nothing is removed that a process has open: its entry is locked. Times are the file system's
own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastload_common.clock import Clock
from fastload_common.compile_cache.stores.directory import is_network_mount, unsafe_reason
from fastload_common.range_cache.entry import DATA, SUFFIXES
from fastload_common.units import MIB, format_size

__all__ = ["CacheDirectory", "FullError", "Row", "UnfitError", "directory_of"]

_NAME = "fastload-ranges-1"
# A kubelet evicts pods when its disk has 10 % left, and removes images at 15 %.
_FREE_SHARE, _FREE_SHARE_IF_BOUND = 0.15, 0.02
# A clock that was wrong leaves times that lie ahead; they say nothing.
_AHEAD_S = 60.0
# A directory cannot be unlinked, and what belongs to somebody else perhaps neither.
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EISDIR)
_LEAST_STEP_BYTES, _MOST_STEP_BYTES = 1 * MIB, 1024 * MIB


class UnfitError(Exception):
    """This directory cannot be used at all; the text says why."""


class FullError(Exception):
    """Nothing more may be kept, and nothing can be removed for it; the text says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One entry as it lies on the disk.

    Attributes:
        used_at_s: its last use, seconds since the epoch.
        size_bytes: that it takes on the disk.
    """

    key: str
    used_at_s: float
    size_bytes: int


def directory_of(root: Path) -> Path:
    """Where entries are below what is set."""
    return root / _NAME


class CacheDirectory:
    """Of one process. `open` first; `require_room` is for one thread.

    Args:
        root: what is set.
        max_bytes: bound of all entries together; None: what the disk has, but for a share of it.
        clock: to tell which times lie ahead.

    Attributes:
        why_not_writable: empty: entries can be written.
    """

    def __init__(self, root: Path, max_bytes: int | None, clock: Clock) -> None:
        self.path = directory_of(root)
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._known_bytes = 0  # that entries took, when last looked at
        self._left_bytes = 0  # that may be written before the next look
        self.why_not_writable = ""

    def open(self, *, create: bool = True) -> bool:
        """Make it, or check that the one that is there is this user's or root's alone.

        Args:
            create: whether it is made; nothing else is here.

        Returns:
            Whether there is one.

        Raises:
            UnfitError: it is not, or it lies on another machine.
            OSError: the disk fails.
        """
        if not self._root.is_dir():
            raise UnfitError(f"{self._root} is no directory{_hint(self._root)}")
        try:
            if create:
                self.path.mkdir(mode=0o700)
            elif not os.path.lexists(self.path):
                return False
        except FileExistsError:
            pass
        except OSError as error:
            raise UnfitError(f"{self.path} cannot be made: {error.strerror}") from error
        self._check()
        return True

    def _check(self) -> None:
        if self.path.is_symlink():
            raise UnfitError(f"{self.path} is a link")
        if not self.path.is_dir():
            raise UnfitError(f"{self.path} is no directory")
        reason = unsafe_reason(self.path)
        if reason:
            raise UnfitError(f"{reason}: wrong weights could be put there")
        if is_network_mount(self.path):
            raise UnfitError(f"{self.path} is on a disk of another machine")
        if not os.access(self.path, os.R_OK | os.X_OK, effective_ids=True):
            mode = self.path.stat().st_mode & 0o7777
            raise UnfitError(f"{self.path} belongs to another user and is closed (mode {mode:#o})")
        if not os.access(self.path, os.W_OK, effective_ids=True):
            read_only = os.statvfs(self.path).f_flag & os.ST_RDONLY
            self.why_not_writable = (
                f"{self.path} is read-only" if read_only else f"{self.path} belongs to another user"
            )

    def rows(self) -> list[Row]:
        """All entries, the least recently used first.

        Raises:
            OSError: the disk fails.
        """
        latest_s = self._clock.wall_s() + _AHEAD_S
        found: dict[str, tuple[float, int]] = {}
        for name, status in self._files():
            key = name.partition(".")[0]
            used_s, size_bytes = found.get(key, (0.0, 0))
            if name.endswith(DATA) and status.st_mtime <= latest_s:
                used_s = status.st_mtime
            found[key] = used_s, size_bytes + status.st_blocks * 512
        return sorted(
            (Row(key, used_s, size) for key, (used_s, size) in found.items()),
            key=lambda row: (row.used_at_s, row.key),
        )

    def require_room(self, size_bytes: int) -> None:
        """Have room for so many more bytes; removes entries that nobody uses where it must.

        Raises:
            FullError: there is none.
            OSError: the disk fails.
        """
        if size_bytes > self._left_bytes:
            # Others write, too. Room for a step is made at once.
            step_bytes = max(self._step_bytes(), size_bytes)
            room_bytes = self._room()
            if room_bytes < step_bytes:
                self._remove(step_bytes - room_bytes)
                room_bytes = self._room()
            if room_bytes < size_bytes:
                raise FullError(self._full())
            self._left_bytes = min(room_bytes, step_bytes)
        self._left_bytes -= size_bytes

    def collect(self, max_bytes: int | None = None) -> tuple[int, int]:
        """Remove entries that nobody uses until the bound holds: how many, and the bytes left.

        Raises:
            OSError: the disk fails.
        """
        if max_bytes is not None:
            self._max_bytes = max_bytes
        removed = self._remove(-self._room())
        return removed, sum(row.size_bytes for row in self.rows())

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIXES):
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def _step_bytes(self) -> int:
        """How much is written between two looks at the whole."""
        bound = self._max_bytes
        share = _MOST_STEP_BYTES if bound is None else bound // 64
        return min(max(share, _LEAST_STEP_BYTES), _MOST_STEP_BYTES)

    def _room(self) -> int:
        """How many bytes may still be written; less than nothing where a bound is broken."""
        self._known_bytes = sum(row.size_bytes for row in self.rows())
        disk = os.statvfs(self.path)
        share = _FREE_SHARE if self._max_bytes is None else _FREE_SHARE_IF_BOUND
        room = disk.f_bavail * disk.f_frsize - int(disk.f_blocks * disk.f_frsize * share)
        if self._max_bytes is not None:
            room = min(room, self._max_bytes - self._known_bytes)
        return room

    def _full(self) -> str:
        known = format_size(self._known_bytes)
        bound = self._max_bytes
        limit = "" if bound is None else f" of {format_size(bound)}"
        disk = os.statvfs(self.path)
        free = format_size(disk.f_bavail * disk.f_frsize)
        return f"full: entries in use take {known}{limit}, {free} of the disk are free"

    def _remove(self, wanted_bytes: int) -> int:
        """Remove least recently used entries of so many bytes, if there are; how many."""
        removed = 0
        if wanted_bytes <= 0:
            return removed
        with self._locked() as is_ours:
            for row in self.rows() if is_ours else ():
                if wanted_bytes <= 0:
                    break
                if self._remove_one(row.key):
                    wanted_bytes -= row.size_bytes
                    removed += 1
        return removed

    def _remove_one(self, key: str) -> bool:
        """Remove an entry, unless it is in use, or cannot be removed."""
        path = self.path / (key + DATA)
        fd: int | None = None
        try:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                    raise
            for suffix in SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path / (key + suffix))
            return True
        except OSError as error:
            if error.errno in _NOT_OURS:
                return False
            raise
        finally:
            if fd is not None:
                os.close(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether this process is the one that removes now; never waits."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)


def _hint(root: Path) -> str:
    """What may have been meant by a path that is not there."""
    text = str(root)
    if re.match("[a-z0-9]+:/", text):
        return "; it must be one on a disk of this node, not a place in a store"
    if text.startswith("~"):
        return "; ~ is not replaced here, give the whole path"
    return "" if root.is_absolute() else "; give the whole path, from / on"
