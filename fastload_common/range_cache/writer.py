"""The thread that writes behind the load. Nobody waits for it: what it has no room for is dropped.

It reads straight from the staging memory, whose slots it holds meanwhile: a bounded number of
bytes, which the load has on top of what it needs itself.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fastload_common.range_cache.entry import Entry
from fastload_common.range_cache.own_files import OddFileError
from fastload_common.range_cache.place import CacheDirectory, FullError
from fastload_common.ranges import ByteRange
from fastload_common.units import MIB

__all__ = ["Item", "Writer", "finish_writes"]

_log = logging.getLogger(__name__)

# At the interpreter's end, for a disk that answers.
_EXIT_PATIENCE_S = 5.0
# For headers and indices, which have memory of their own.
_FIRST_BUDGET_BYTES = 64 * MIB

_lock = threading.Lock()
_running: set[Writer] = set()  # each has a thread that ends


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes to keep.

    Attributes:
        parts: ranges and their bytes, which are valid until `done` is called, once.
        held_bytes: of the memory that is held for them.
    """

    entry: Entry
    parts: tuple[tuple[ByteRange, memoryview], ...]
    held_bytes: int
    done: Callable[[], None]

    @property
    def size_bytes(self) -> int:
        return sum(byte_range.size_bytes for byte_range, _ in self.parts)


class Writer:
    """Writes items in the order in which they are offered. The thread starts with the first one.

    Args:
        directory: for the bounds.
        failed: told once why nothing more is written; the text is for the log.
        odd: told why nothing more is written of one entry.

    Attributes:
        budget_bytes: most bytes that are held and not yet written.
        written_bytes: with their record.
        pending_bytes: taken, and not yet written.
        dropped_bytes: offered, but there was no room, or nothing more is written.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        failed: Callable[[str], None],
        odd: Callable[[Entry, OddFileError], None],
    ) -> None:
        self._directory = directory
        self._odd = odd
        self._passed: set[Entry] = set()  # nothing more of them
        self.budget_bytes = _FIRST_BUDGET_BYTES
        self._failed = failed
        self._changed = threading.Condition()
        self._queue: deque[Item] = deque()
        self._held_bytes = 0
        self._thread: threading.Thread | None = None
        self._ending = False
        self._broken = False
        self._last: Callable[[], None] = _nothing
        self.written_bytes = self.pending_bytes = self.dropped_bytes = 0

    def offer(self, item: Item) -> bool:
        """Take an item, or say no: then its ``done`` is the caller's to call. Never waits."""
        with self._changed:
            is_full = self._held_bytes + item.held_bytes > self.budget_bytes
            is_over = self._broken or self._ending or is_full
            if is_over or (self._thread is None and not self._start()):
                self.dropped_bytes += item.size_bytes
                return False
            self._held_bytes += item.held_bytes
            self.pending_bytes += item.size_bytes
            self._queue.append(item)
            self._changed.notify()
        return True

    def drop(self, size_bytes: int) -> None:
        """Count what is not kept for another reason."""
        with self._changed:
            self.dropped_bytes += size_bytes

    def stop(self) -> None:
        """Write nothing more than what is being written now."""
        with self._changed:
            self._broken = True
            self._changed.notify()

    def end(self, last: Callable[[], None]) -> None:
        """No more offers; the thread ends by itself, behind the caller, with ``last``."""
        with self._changed:
            self._ending = True
            self._last = last
            is_running = self._thread is not None
            self._changed.notify()
        if not is_running:
            last()

    def join(self, timeout_s: float) -> bool:
        """Whether everything is written, after waiting for it."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            return not thread.is_alive()
        return True

    def _start(self) -> bool:
        self._thread = threading.Thread(target=self._work, name="fastload-keep", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            self._broken = True
            self._failed(f"no thread to write with: {error}")
            return False
        # The interpreter freezes daemon threads at its end; what is held then is nearly written.
        with _lock:
            if not _running:
                atexit.register(_finish_at_exit)
            _running.add(self)
        return True

    def _work(self) -> None:
        try:
            while (item := self._next()) is not None:
                try:
                    self._write(item)
                finally:
                    item.done()
                    with self._changed:
                        self._held_bytes -= item.held_bytes
                        self.pending_bytes -= item.size_bytes
                del item  # an idle thread would keep its memory
        finally:
            # First: whoever waits for the end finds nothing in use any more.
            try:
                self._last()
            finally:
                with _lock:
                    _running.discard(self)
                    if not _running:
                        atexit.unregister(_finish_at_exit)

    def _next(self) -> Item | None:
        with self._changed:
            while not self._queue:
                if self._ending:
                    return None
                self._changed.wait()
            return self._queue.popleft()

    def _write(self, item: Item) -> None:
        left_bytes = item.size_bytes
        if not self._broken and item.entry not in self._passed:
            try:
                self._directory.require_room(left_bytes)
                if item.entry.is_open or item.entry.open(create=True):
                    for byte_range, data in item.parts:
                        item.entry.write(byte_range, data)
                        self.written_bytes += byte_range.size_bytes
                        left_bytes -= byte_range.size_bytes
            except FullError as error:
                self._fail(str(error))
            except OddFileError as error:
                self._passed.add(item.entry)
                self._odd(item.entry, error)
            except OSError as error:
                self._fail(f"{error.strerror or error} ({self._directory.path})")
            except Exception as error:  # noqa: BLE001 -- the load goes on, and this is its log
                self._fail(f"{type(error).__name__}: {error}")
        self.dropped_bytes += left_bytes

    def _fail(self, reason: str) -> None:
        self._broken = True
        self._failed(reason)


def finish_writes(timeout_s: float) -> bool:
    """Whether all writers of this process that were told to end have ended, after waiting for it.

    For whoever ends a process soon after its load.
    """
    with _lock:
        writers = list(_running)
    ended = [writer.join(timeout_s) for writer in writers]
    return all(ended)


def _finish_at_exit() -> None:
    if not finish_writes(_EXIT_PATIENCE_S):
        _log.warning("the node cache did not end its last writes in time")


def _nothing() -> None:
    """Nobody waits for the end."""
