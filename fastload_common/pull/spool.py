"""One blob on its way to disk: ranges come in any order, readers follow from the start.

Written at their offsets into one file; a journal beside it says which ranges are there and what
their CRC is, so that a pull that was ended goes on where it was, and what is on the disk is
compared before it counts.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

from fastload_common.errors import PullError
from fastload_common.ranges import ByteRange
from fastload_common.units import MIB

__all__ = ["Aborted", "Spool"]

_RECORD = struct.Struct("<QQI")
_PIECE_BYTES = 1 * MIB
_MOST_RECORDS = 4_000_000


class Aborted(Exception):
    """The pull has failed elsewhere; whoever waits for bytes ends without a word."""


class Spool:
    """A file that fills. `write` is for one thread, reading for any number of others.

    Args:
        path: of the file; the journal is beside it.
        size_bytes: of the blob.

    Attributes:
        resumed_bytes: what was there already, and is what the journal says.
        is_rewritten: bytes that readers may have had were written once more.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.resumed_bytes = 0
        self.is_rewritten = False
        self._journal_path = path.with_name(path.name + ".parts")
        self._changed = threading.Condition()
        self._starts: list[int] = []  # of ranges that are there: disjoint, sorted, not touching
        self._ends: list[int] = []
        self._aborted = False
        # Whoever has read the last byte may discard the file before its writer is done with it.
        self._files = threading.RLock()
        self._fd = -1
        self._journal = -1

    @property
    def present_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    @property
    def is_complete(self) -> bool:
        return self.present_bytes == self.size_bytes

    def prepare(self) -> None:
        """Make the file, and take over what a former pull left of it."""
        self._open()
        try:
            kept = [row for row in self._rows() if self._is_sound(row)]
            os.ftruncate(self._fd, self.size_bytes)
            # Written anew: a record may be cut off, and those after it would not be found.
            os.ftruncate(self._journal, 0)
            for start, end, crc in kept:
                self._note(ByteRange(start, end), crc)
        finally:
            self.close()
        self.resumed_bytes = self.present_bytes

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        self._journal = os.open(self._journal_path, flags | os.O_APPEND, 0o600)

    def close(self) -> None:
        """Close the file; what is there stays for the next pull. Safe to call twice."""
        with self._files:
            for descriptor in (self._fd, self._journal):
                if descriptor >= 0:
                    os.close(descriptor)
            self._fd = self._journal = -1

    def discard(self) -> None:
        """Close and delete the file; what was there counts as having been there."""
        self.close()
        for path in (self.path, self._journal_path):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def give_up_journal(self) -> None:
        """The file is checked and finished: it is only a file from now on."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._journal_path.unlink()

    def missing(self) -> list[ByteRange]:
        """What is not there, in order."""
        with self._changed:
            edges = [0, *(edge for pair in self._pairs() for edge in pair), self.size_bytes]
        found = (ByteRange(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True))
        return [one for one in found if one.size_bytes]

    def write(self, start: int, data: memoryview) -> None:
        """Put a range where it belongs. With the last one the file is closed.

        Raises:
            OSError: the disk is full, or the like.
        """
        with self._files:
            if self._fd < 0:
                self._open()
            done_bytes = 0
            while done_bytes < len(data):
                done_bytes += os.pwrite(self._fd, data[done_bytes:], start + done_bytes)
            self.note(start, data)

    def note(self, start: int, data: memoryview) -> None:
        """Say that these bytes are in the file, however they came there."""
        with self._files:
            if self._fd < 0:
                self._open()
            self._note(ByteRange(start, start + len(data)), zlib.crc32(data))
            if self.is_complete:
                self.close()

    def abort(self) -> None:
        """Wake all readers; they end with `Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self, piece_bytes: int) -> Iterator[Callable[[], bytes]]:
        """Gives all bytes in order, each piece as soon as it is there; empty at the end.

        Raises (when asked for a piece):
            Aborted: see `abort`.
            PullError: somebody made the file shorter.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        at = 0

        def next_piece() -> bytes:
            nonlocal at
            size_bytes = self._wait(at, piece_bytes)
            data = os.pread(descriptor, size_bytes, at) if size_bytes else b""
            if size_bytes and not data:
                raise PullError(f"{self.path} became shorter while it was read", hint="pull again")
            at += len(data)
            return data

        try:
            yield next_piece
        finally:
            os.close(descriptor)

    def _wait(self, start: int, most_bytes: int) -> int:
        """Wait for bytes at an offset; how many there are, 0 at the blob's end."""
        with self._changed:
            while not self._aborted and start < self.size_bytes and self._end_at(start) <= start:
                self._changed.wait()
            if self._aborted:
                raise Aborted
            return min(most_bytes, self._end_at(start) - start)

    def _end_at(self, start: int) -> int:
        """The end of what is there from an offset on without a gap."""
        index = bisect_left(self._starts, start + 1) - 1
        return max(start, self._ends[index]) if index >= 0 else start

    def _pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def _note(self, there: ByteRange, crc: int) -> None:
        os.write(self._journal, _RECORD.pack(there.start, there.end, crc))
        with self._changed:
            # Joined with all that it touches or overlaps.
            first = bisect_left(self._ends, there.start)
            last = bisect_left(self._starts, there.end + 1)
            start, end = there.start, there.end
            if first < last:
                start = min(start, self._starts[first])
                end = max(end, self._ends[last - 1])
            self._starts[first:last] = [start]
            self._ends[first:last] = [end]
            self._changed.notify_all()

    def _rows(self) -> list[tuple[int, int, int]]:
        size_bytes = min(os.fstat(self._journal).st_size, _MOST_RECORDS * _RECORD.size)
        size_bytes -= size_bytes % _RECORD.size
        data = b""
        while len(data) < size_bytes and (
            more := os.pread(self._journal, size_bytes - len(data), len(data))
        ):
            data += more
        whole = len(data) - len(data) % _RECORD.size
        rows = _RECORD.iter_unpack(data[:whole])
        return [row for row in rows if row[0] < row[1] <= self.size_bytes]

    def _is_sound(self, row: tuple[int, int, int]) -> bool:
        """Whether the bytes on the disk are those that were written."""
        start, end, crc = row
        value = 0
        while start < end:
            data = os.pread(self._fd, min(_PIECE_BYTES, end - start), start)
            if not data:
                return False
            value = zlib.crc32(data, value)
            start += len(data)
        return value == crc
