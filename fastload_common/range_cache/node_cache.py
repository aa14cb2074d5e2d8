"""The node's cache as one load of one rank uses it: what it holds, what it keeps, why it does not.

A cache is never a reason to fail or to wait: whatever goes wrong with it is one warning, and the
load goes on from its source.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fastload_common.clock import Clock
from fastload_common.range_cache.coverage import Cover
from fastload_common.range_cache.entry import Entry, Identity
from fastload_common.range_cache.own_files import OddFileError
from fastload_common.range_cache.patience import NoAnswerError, ask
from fastload_common.range_cache.place import CacheDirectory, UnfitError
from fastload_common.range_cache.records import Piece
from fastload_common.range_cache.writer import Item, Writer
from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["PATIENCE_S", "NodeCache"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A disk that lets a small read wait for so long is of no use to a load.
PATIENCE_S = 10.0
# One may be a bad place of the disk.
_MOST_ERRORS = 3


class NodeCache:
    """For any thread. `close` it.

    Args:
        root: what is set.
        max_bytes: see `CacheDirectory`.
        clock: time.
        patience_s: how long a disk may keep silent, in real time. Default: `PATIENCE_S`.

    Attributes:
        read_bytes: that a load got from here and not from its source.
        chunk_bytes: of these, those of chunks.
        damaged_bytes: that did not match their checksums.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        clock: Clock,
        *,
        patience_s: float | None = None,
    ) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._entries: dict[ObjectId, Entry] = {}
        self._directory = CacheDirectory(root, max_bytes, clock)
        self._writer = Writer(self._directory, self._keep_nothing, self._leave_odd)
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._why_not_kept = self._why_not_used = self._why_not_all = ""
        self._lost: set[ObjectId] = set()  # nothing of them is kept
        self._told = self._closed = False
        self._errors = 0
        self.read_bytes = self.chunk_bytes = self.damaged_bytes = 0
        try:
            self._asked(self._directory.open)
            self._why_not_kept = self._directory.why_not_writable
            if self._why_not_kept:
                self._tell(f"nothing is kept: {self._why_not_kept}")
        except UnfitError as error:
            self.give_up(str(error))

    @property
    def is_on(self) -> bool:
        """Whether anything is read from it."""
        return not self._why_not_used

    @property
    def patience_s(self) -> float:
        return self._patience_s

    def use(self, scope: str, object_id: ObjectId) -> None:
        """From now on this object is read from the cache and kept there.

        Not if its states cannot be told apart: the one that is held may be another one.

        Args:
            scope: see `Identity`.
        """
        if self._why_not_used or object_id.etag is None or object_id in self._entries:
            return
        if not object_id.is_one_state:
            self._pass_by(object_id, f"{object_id.uri} has an ETag that tells no states apart")
            return
        identity = Identity(scope, object_id)
        entry = Entry(self._directory.path, identity, writable=not self._why_not_kept)
        self._asked(lambda: self._open(entry))
        with self._lock:
            if not self._closed and self._entries.setdefault(object_id, entry) is entry:
                return
        entry.close()

    def cover(self, object_id: ObjectId, byte_range: ByteRange) -> Cover:
        """What of a range is held."""
        entry = self._entries.get(object_id)
        if entry is None or self._why_not_used:
            return Cover((), (byte_range,))
        return entry.coverage.cover(byte_range)

    def read_held(
        self, object_id: ObjectId, cover: Cover, memory: memoryview, start: int
    ) -> list[ByteRange]:
        """Read what a cover holds; blocks as long as the disk does.

        Args:
            memory: writable, of a range of the object that begins at ``start``.

        Returns:
            The ranges that could not be read, or were damaged.
        """
        entry = self._entries[object_id]
        lost: list[ByteRange] = []
        for held in cover.held:
            if self._why_not_used:
                lost.append(held.wanted)
                continue
            try:
                bad = entry.read(held, memory, start)
            except OSError as error:
                lost.append(held.wanted)
                entry.coverage.drop(held.span)
                self._failed(entry, error)
                continue
            if bad:
                lost += [part for p in bad if (part := _part(p, held.wanted)) is not None]
                self._forget(entry, bad)
        return lost

    def read(self, object_id: ObjectId, byte_range: ByteRange) -> bytes | None:
        """A small range; None where not all of it is held and good. Waits for so long at most."""
        cover = self.cover(object_id, byte_range)
        if cover.missing or not cover.held:
            return None
        data = bytearray(byte_range.size_bytes)
        memory = memoryview(data)
        lost = self._asked(lambda: self.read_held(object_id, cover, memory, byte_range.start))
        if lost is None or lost:
            return None
        with self._lock:
            self.read_bytes += byte_range.size_bytes
        return bytes(data)

    def keep(
        self,
        object_id: ObjectId,
        parts: Sequence[tuple[ByteRange, memoryview]],
        held_bytes: int,
        done: Callable[[], None],
    ) -> bool:
        """Take bytes to be written behind the load; see `Writer.offer`."""
        entry = self._entries.get(object_id)
        if entry is None or self._why_not_kept or self._why_not_used or object_id in self._lost:
            self._writer.drop(sum(byte_range.size_bytes for byte_range, _ in parts))
            return False
        return self._writer.offer(Item(entry, tuple(parts), held_bytes, done))

    def count_chunk(self, size_bytes: int) -> None:
        """So many bytes of a chunk came from here."""
        with self._lock:
            self.read_bytes += size_bytes
            self.chunk_bytes += size_bytes

    def allow(self, budget_bytes: int) -> None:
        """Set how much memory may be held for what is still to be written."""
        self._writer.budget_bytes = budget_bytes

    def discard(self, uri: str) -> None:
        """What is held of an object is wrong as a whole: the store's checksum says so."""
        for object_id, entry in list(self._entries.items()):
            if object_id.uri == uri:
                self._lost.add(object_id)
                entry.coverage.clear()
                if not self._why_not_kept:
                    self._asked(entry.remove)

    def give_up(self, reason: str) -> None:
        """Use the cache no more in this load."""
        with self._lock:
            if self._why_not_used:
                return
            self._why_not_used = reason
        self._writer.stop()
        self._tell(f"the load goes on without it: {reason}")

    def close(self) -> None:
        """Let the writer end behind the caller, and then give the entries back."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.end(self._close_entries)

    def join(self, timeout_s: float) -> bool:
        """Whether all is written, after waiting for it; for tests and tools."""
        return self._writer.join(timeout_s)

    def facts(self) -> dict[str, Any]:
        """For the report."""
        writer = self._writer
        return {
            "directory": str(self._root),
            "read_bytes": self.read_bytes,
            "kept_bytes": writer.written_bytes,
            "pending_bytes": writer.pending_bytes,
            "dropped_bytes": writer.dropped_bytes,
            "damaged_bytes": self.damaged_bytes,
            "reason": self._why_not_used or self._why_not_kept or self._why_not_all or None,
        }

    def _open(self, entry: Entry) -> None:
        try:
            entry.open()
        except OddFileError as error:
            self._leave_odd(entry, error)

    def _leave_odd(self, entry: Entry, error: OddFileError) -> None:
        """Use an entry no more: one of its files is not what it must be."""
        entry.coverage.clear()
        self._pass_by(entry.identity.object_id, error.reason)

    def _pass_by(self, object_id: ObjectId, reason: str) -> None:
        """Nothing more is kept of one object; the first one is a warning."""
        with self._lock:
            if object_id in self._lost:
                return
            self._lost.add(object_id)
            is_first = not self._why_not_all
            self._why_not_all = self._why_not_all or f"some objects are not kept: {reason}"
        level = logging.WARNING if is_first else logging.DEBUG
        _log.log(level, "node cache %s: an object is not kept: %s", self._root, reason)

    def _forget(self, entry: Entry, bad: Sequence[Piece]) -> None:
        size_bytes = sum(piece.end - piece.start for piece in bad)
        with self._lock:
            is_first = not self.damaged_bytes
            self.damaged_bytes += size_bytes
        if is_first:
            _log.warning(
                "node cache: %s is damaged: %d bytes from %d on do not match their checksum; they "
                "are read from the source again",
                entry.path(".data"),
                size_bytes,
                bad[0].start,
            )
        try:
            entry.forget(bad)
        except OddFileError as error:
            self._leave_odd(entry, error)
        except OSError as error:
            self._keep_nothing(str(error.strerror or error))

    def _failed(self, entry: Entry, error: OSError) -> None:
        """A read failed: it may be one bad place of the disk, or the disk."""
        with self._lock:
            self._errors += 1
            count = self._errors
        if count >= _MOST_ERRORS:
            self.give_up(f"{error.strerror or error} ({entry.path('.data')})")
        else:
            _log.warning("node cache: %s: %s", entry.path(".data"), error.strerror or error)

    def _asked(self, question: Callable[[], _T]) -> _T | None:
        """The answer of a disk; None: there is none, and the cache is given up."""
        try:
            return ask(question, self._patience_s)
        except NoAnswerError as error:
            self.give_up(str(error))
        except OSError as error:
            self.give_up(f"{error.strerror or error} ({self._directory.path})")
        except UnfitError:
            raise
        except Exception as error:  # noqa: BLE001 -- a cache is no reason to fail
            self.give_up(f"{type(error).__name__}: {error}")
        return None

    def _keep_nothing(self, reason: str) -> None:
        with self._lock:
            if self._why_not_kept or self._why_not_used:
                return
            self._why_not_kept = reason
        self._writer.stop()
        self._tell(f"nothing more is kept: {reason}")

    def _tell(self, text: str) -> None:
        with self._lock:
            told, self._told = self._told, True
        _log.log(logging.DEBUG if told else logging.WARNING, "node cache %s: %s", self._root, text)

    def _close_entries(self) -> None:
        for entry in list(self._entries.values()):
            entry.close()


def _part(piece: Piece, wanted: ByteRange) -> ByteRange | None:
    return ByteRange(piece.start, piece.end).intersect(wanted)
