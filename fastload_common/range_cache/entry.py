"""One object in the cache: a sparse data file, with the bytes where they are in the object, and the
journal of its good ranges.

    <key>.data   <key>.journal   <key>.json (what it is, for people; <key>.new until it is whole)

Guarantees: nothing is handed out that does not match its recorded checksum. Data is written before
its record, nothing is written over with other bytes, and nothing is synced: a crash or a power
loss leaves records that do not match, which are found when they are read. A shared lock on the data
file tells other processes that it is in use; it is gone with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastload_common.checksums.algorithms import crc_function
from fastload_common.checksums.combine import combine
from fastload_common.errors import ConfigError
from fastload_common.range_cache.coverage import Coverage, Held
from fastload_common.range_cache.own_files import OddFileError, open_own
from fastload_common.range_cache.records import (
    ALGORITHMS,
    BLOCK_BYTES,
    Piece,
    forgotten,
    pack,
    unpack,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.units import MIB

__all__ = ["DATA", "FACTS", "SUFFIXES", "Entry", "Identity", "usable_algorithms"]

DATA, JOURNAL, FACTS, _NEW = ".data", ".journal", ".json", ".new"
# In the order in which they are removed: a journal must never speak of data that is not there.
SUFFIXES = (JOURNAL, DATA, FACTS, _NEW)
_FORMAT = 1
_MOST_JOURNAL_BYTES = 64 * MIB
# An entry that is being removed is gone at the next look.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """What an entry is of.

    Attributes:
        scope: what tells stores apart that have objects of the same URI.
        object_id: its state; with an ETag.
    """

    scope: str
    object_id: ObjectId

    @property
    def facts(self) -> dict[str, object]:
        one = self.object_id
        rows = {"uri": one.uri, "etag": one.etag, "size_bytes": one.size_bytes}
        return {"format": _FORMAT, "scope": self.scope, **rows}

    @property
    def key(self) -> str:
        """The name of its files."""
        return sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:40]


@cache
def usable_algorithms() -> tuple[int, ...]:
    """Numbers of the checksums that can be computed here, the best one first."""
    found = []
    for number, algorithm in ALGORITHMS.items():
        with contextlib.suppress(ConfigError):
            crc_function(algorithm)
            found.append(number)
    return tuple(found)


class Entry:
    """Opened by one thread; then read by any, and written by one. `close` is for any, at any time.

    Args:
        directory: of the cache.
        identity: of the object.
        writable: whether anything may be written.
    """

    def __init__(self, directory: Path, identity: Identity, *, writable: bool) -> None:
        self.identity = identity
        self.key = identity.key
        self.coverage = Coverage(frozenset(usable_algorithms()))
        self._directory = directory
        self._writable = writable
        self._size_bytes = identity.object_id.size_bytes
        self._fd: int | None = None
        self._removed = self._closed = self._described = False
        self._journal_bytes = 0  # so many of it are in the coverage
        self._lock = threading.Lock()

    def path(self, suffix: str) -> Path:
        return self._directory / (self.key + suffix)

    @property
    def is_open(self) -> bool:
        return self._fd is not None

    def open(self, *, create: bool = False) -> bool:
        """Lock and read what is there; False: nothing is, or it is just being removed, or closed.

        Raises:
            OddFileError: a file is not what it must be.
            OSError: the disk fails.
        """
        with self._exclusively():
            for _ in range(_TRIES):
                if self._closed or self._fd is not None or self._open(create):
                    break
            if self._fd is None:
                return False
            self._read_journal()
            return True

    def close(self) -> None:
        """Give the lock back, also that of a forked process, for good. Safe to call twice.

        Never waits: whoever waits for the disk in this entry closes it afterwards, if ever.
        """
        self._closed = True
        if not self._lock.acquire(blocking=False):
            return
        try:
            fd, self._fd = self._fd, None
            if fd is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
        finally:
            self._lock.release()

    def read(self, held: Held, memory: memoryview, start: int) -> list[Piece]:
        """Read and check a part of what is held.

        Args:
            held: of this entry's coverage.
            memory: writable, of a range of the object.
            start: where that range begins in the object.

        Returns:
            The pieces that are not what was recorded; empty: the part is in memory and right.

        Raises:
            OSError: the disk fails.
        """
        if self._check(held, memory, start):
            return []
        bad = []
        for piece in held.pieces:
            byte_range = ByteRange(piece.start, piece.end)
            wanted = byte_range.intersect(held.wanted) or ByteRange(piece.start, piece.start)
            if not self._check(Held((piece,), wanted), memory, start):
                bad.append(piece)
        return bad

    def write(self, byte_range: ByteRange, data: memoryview) -> list[Piece]:
        """Write a range, and what its checksums are; what is held already is left out.

        Returns:
            What was written.

        Raises:
            OSError: the disk fails or is full.
        """
        if self._removed:
            return []
        self._take_news()
        written: list[Piece] = []
        missing = self.coverage.cover(byte_range).missing
        if missing and not self._described:
            self._describe()
            self._described = True
        for part in missing:
            memory = data[part.start - byte_range.start : part.end - byte_range.start]
            pieces = _pieces_of(part, memory)
            self._write_all(memory, part.start)
            written += pieces
        self._append(written, os.O_CREAT)
        return written

    def forget(self, pieces: Sequence[Piece]) -> None:
        """These are damaged: no more of them, here and for those who come later.

        Raises:
            OSError: that could not be written down.
        """
        for piece in pieces:
            self.coverage.drop(ByteRange(piece.start, piece.end))
        if self._writable:
            records = [row for p in pieces for row in forgotten(ByteRange(p.start, p.end))]
            with contextlib.suppress(FileNotFoundError):  # then it speaks of nothing
                self._append(records, 0)

    def remove(self) -> None:
        """Take its files away, whoever uses them: their descriptors live on."""
        self._removed = True
        self.coverage.clear()
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                self.path(suffix).unlink()

    def _open(self, create: bool) -> bool:
        flags = os.O_RDWR if self._writable else os.O_RDONLY
        path = self.path(DATA)
        try:
            fd = open_own(path, flags | (os.O_CREAT if create else 0))
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.stat(path, follow_symlinks=False).st_ino != os.fstat(fd).st_ino:
                raise BlockingIOError  # it was removed before it was locked
            if self._writable:
                os.utime(fd)  # the last use, by the file system's clock
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._closed:  # meanwhile, by somebody who did not wait
                self.close()

    def _describe(self) -> None:
        """Write down what this is, unless that stands there whole."""
        path, new = self.path(FACTS), self.path(_NEW)
        data = json.dumps(self.identity.facts).encode()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path, follow_symlinks=False).st_size == len(data):
                return
        # Others may do the same at the same time: not truncated, it is theirs too, byte for byte.
        fd = open_own(new, os.O_WRONLY | os.O_CREAT)
        try:
            _write_once(fd, data, new)
            os.ftruncate(fd, len(data))
        finally:
            os.close(fd)
        try:
            os.replace(new, path)
        except FileNotFoundError:
            pass  # another one did it
        except IsADirectoryError as error:
            raise OddFileError(errno.EISDIR, "is a directory", path) from error

    def _read_journal(self) -> None:
        try:
            fd = open_own(self.path(JOURNAL), os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            self._take_from(fd)
        finally:
            os.close(fd)

    def _take_from(self, fd: int) -> None:
        """Take over what stands in the journal beyond what was taken."""
        size_bytes = os.fstat(fd).st_size
        if size_bytes > _MOST_JOURNAL_BYTES:
            raise OddFileError(errno.EFBIG, "is too long, remove it", self.path(JOURNAL))
        if size_bytes <= self._journal_bytes:
            return
        data = os.pread(fd, size_bytes - self._journal_bytes, self._journal_bytes)
        pieces, end = unpack(self.key, data, self._size_bytes)
        self.coverage.add(pieces)
        self._journal_bytes += end

    def _take_news(self) -> None:
        """What other processes have written meanwhile."""
        with self._exclusively():
            self._read_journal()

    def _append(self, pieces: Sequence[Piece], flags: int) -> None:
        if not pieces:
            return
        data = pack(self.key, pieces)
        path = self.path(JOURNAL)
        with self._exclusively():
            fd = open_own(path, os.O_WRONLY | os.O_APPEND | flags)
            try:
                _write_once(fd, data, path)
            finally:
                os.close(fd)
        self.coverage.add(pieces)

    def _write_all(self, memory: memoryview, start: int) -> None:
        fd = self._descriptor()
        done = 0
        while done < len(memory):
            done += os.pwrite(fd, memory[done:], start + done)

    def _check(self, held: Held, memory: memoryview, start: int) -> bool:
        span, wanted = held.span, held.wanted
        head = memoryview(bytearray(max(0, wanted.start - span.start)))
        tail = memoryview(bytearray(max(0, span.end - wanted.end)))
        own = memory[wanted.start - start : wanted.end - start]
        fd = self._descriptor()
        if not _read_all(fd, [part for part in (head, own, tail) if len(part)], span.start):
            return False
        number = held.pieces[0].algorithm
        value = 0
        for part in (head, own, tail):
            value = _crc(number, part, value)
        return value == _expected(held.pieces)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path(DATA)))
        return self._fd


def _crc(number: int, data: memoryview, value: int = 0) -> int:
    """The CRC of what ``value`` is the CRC of, and then ``data``."""
    function = crc_function(ALGORITHMS[number])
    return function(data, value) if len(data) else value


def _expected(pieces: Sequence[Piece]) -> int:
    algorithm = ALGORITHMS[pieces[0].algorithm]
    value = pieces[0].value
    for piece in pieces[1:]:
        value = combine(algorithm, value, piece.value, piece.end - piece.start)
    return value


def _pieces_of(byte_range: ByteRange, data: memoryview) -> list[Piece]:
    number = usable_algorithms()[0]
    pieces = []
    start = byte_range.start
    while start < byte_range.end:
        end = min(start - start % BLOCK_BYTES + BLOCK_BYTES, byte_range.end)
        part = data[start - byte_range.start : end - byte_range.start]
        pieces.append(Piece(start, end, number, _crc(number, part)))
        start = end
    return pieces


def _read_all(fd: int, buffers: list[memoryview], offset: int) -> bool:
    """Fill buffers one after the other; False: the file ends before."""
    while buffers:
        count = os.preadv(fd, buffers, offset)
        if not count:
            return False
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return True


def _write_once(fd: int, data: bytes, path: Path) -> None:
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
