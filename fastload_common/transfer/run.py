"""The state of one fetch, shared by its consumer and the workers. No I/O happens here.

Every chunk is given out once, in order. Each is then delivered, or counted in a failure.
After `stop` nothing is delivered any more: what arrives late is released at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from fastload_common.clock import Clock
from fastload_common.errors import DeadlineError, SourceError
from fastload_common.plan.records import Chunk
from fastload_common.units import format_size

__all__ = ["Filled", "Run", "Staging", "StagingSlot"]

_log = logging.getLogger(__name__)

# A deadline is on the injected clock; a blocked consumer looks at it this often, in real time.
# Without one as well: a signal that comes just before a thread blocks does not wake it.
_POLL_S = 0.1
# A silence longer than this is worth a line in the log, in real time.
_STALL_WARNING_S = 30.0
_MAX_NOTES = 5


class StagingSlot(Protocol):
    """One leased piece of writable memory."""

    @property
    def memory(self) -> memoryview: ...

    def release(self) -> None: ...


class Staging(Protocol):
    """What `fastload_common.staging.arena.Arena` offers; a neighbour that is not imported."""

    @property
    def slot_bytes(self) -> int: ...

    def lease(
        self, stop: threading.Event | None = None, size_bytes: int | None = None
    ) -> StagingSlot | None: ...

    def wake(self) -> None: ...


class Filled:
    """A fetched chunk in staging memory. Whoever got it must `release` it.

    Attributes:
        chunk: what was asked.
        data: exactly the chunk's bytes; valid until `release`.
    """

    __slots__ = ("_slot", "chunk", "data")

    def __init__(self, chunk: Chunk, slot: StagingSlot) -> None:
        self.chunk = chunk
        self.data = slot.memory[: chunk.byte_range.size_bytes]
        self._slot = slot

    def release(self) -> None:
        """Give the memory back to the arena. Safe to call twice."""
        # Turns use after release into an error, except through views made from this one.
        with contextlib.suppress(BufferError):
            self.data.release()
        self._slot.release()


class Run:
    """One call of `Fetcher.fetch`.

    Args:
        chunks: all of them, in the order in which their requests begin.
        deadline_s: reading of the clock at which the load must have ended; None: never.
        limit_s: the configured duration that led to it, for the message.

    Attributes:
        largest_bytes: what any of the chunks fits into.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        clock: Clock,
        *,
        deadline_s: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        self.stop = threading.Event()
        self._clock = clock
        self._deadline_s = deadline_s
        self._limit_s = limit_s
        self._chunk_count = len(chunks)
        self.largest_bytes = max((chunk.byte_range.size_bytes for chunk in chunks), default=0)
        self._size_bytes = sum(chunk.byte_range.size_bytes for chunk in chunks)
        self._changed = threading.Condition()
        self._pending = deque(chunks)
        self._unreserved = len(chunks)
        self._results: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._last_fault: SourceError | None = None
        self._active = 0
        self._delivered_count = 0
        self._delivered_bytes = 0

    # Called by workers.

    def enter(self) -> bool:
        """A worker begins to serve this run; False if there is nothing left to do."""
        with self._changed:
            if self.stop.is_set():
                return False
            self._active += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._active -= 1
            self._changed.notify_all()

    def reserve(self) -> bool:
        """Speak for one chunk, before waiting for memory; False if none is left.

        Memory first, then the chunk: so requests begin in the order given, and no worker
        waits for memory that it would not need.
        """
        with self._changed:
            if self.stop.is_set() or not self._unreserved:
                return False
            self._unreserved -= 1
            return True

    def take(self) -> Chunk:
        """The next chunk; only after a `reserve`."""
        with self._changed:
            return self._pending.popleft()

    def deliver(self, filled: Filled) -> None:
        with self._changed:
            if not self.stop.is_set():
                self._delivered_count += 1
                self._delivered_bytes += len(filled.data)
                self._results.put(filled)
                return
        filled.release()

    def fail(self, error: BaseException) -> None:
        """End the run with this error; consequences of the end itself are not recorded."""
        with self._changed:
            self._failures.append(error)
            self.stop.set()
        self._results.put(None)

    def note_fault(self, error: SourceError) -> None:
        """Remember the latest fault that is being retried, to explain a missed deadline."""
        self._last_fault = error

    def remaining_s(self) -> float | None:
        """Seconds to the deadline, perhaps negative; None without one."""
        return None if self._deadline_s is None else self._deadline_s - self._clock.monotonic_s()

    def deadline_error(self) -> DeadlineError:
        fault = self._last_fault
        return DeadlineError(
            f"the load was not finished after {self._limit_s} s: {self._delivered_count} of "
            f"{self._chunk_count} ranges ({format_size(self._delivered_bytes)} of "
            f"{format_size(self._size_bytes)}) had arrived",
            hint="raise FASTLOAD_DEADLINE_S, or see why the store is slow",
            last_fault=None if fault is None else f"{type(fault).__name__}: {fault}",
        )

    # Called by the consumer.

    def next_filled(self) -> Filled:
        """The next chunk to arrive.

        Raises:
            BaseException: the first failure of a worker.
            DeadlineError: the deadline has passed while waiting.
        """
        if not self._failures:
            filled = self._wait()
            if filled is not None and not self._failures:
                return filled
            if filled is not None:
                filled.release()
        raise self._failures[0]

    def attach_notes(self) -> None:
        """Hang all further failures on the first one; only when no worker is left."""
        if not self._failures:
            return
        first, *others = self._failures
        seen = {f"{type(first).__name__}: {first}"}
        for other in others:
            text = f"{type(other).__name__}: {other}"
            if text not in seen and len(seen) <= _MAX_NOTES:
                first.add_note(f"also failed: {text}")
            seen.add(text)

    def _wait(self) -> Filled | None:
        poll_s = min(_POLL_S, _STALL_WARNING_S)
        waited_s = 0.0
        while True:
            try:
                return self._results.get(timeout=0 if self._is_late() else poll_s)
            except queue.Empty:
                if self._is_late():
                    self.fail(self.deadline_error())
                    return None
            waited_s += poll_s
            if waited_s >= _STALL_WARNING_S:
                self._warn_of_stall(waited_s)
                waited_s = 0.0

    def _warn_of_stall(self, waited_s: float) -> None:
        with self._changed:
            taken = self._chunk_count - len(self._pending)
            in_flight = taken - self._delivered_count
            waiting = self._chunk_count - self._unreserved - taken
        _log.warning(
            "no range has arrived for %.0f s: %d of %d ranges are there, %d in flight, %d wait "
            "for staging memory%s",
            waited_s,
            self._delivered_count,
            self._chunk_count,
            in_flight,
            waiting,
            " (nothing is in flight: all of it is held by whoever places)" if not in_flight else "",
        )

    def _is_late(self) -> bool:
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s <= 0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk was delivered, so that no worker has anything left to do."""
        return self._delivered_count == self._chunk_count

    def halt(self) -> None:
        """No more requests, no more deliveries."""
        with self._changed:
            self.stop.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait, in real time, until no worker serves this run; False if some still do."""
        with self._changed:
            return self._changed.wait_for(lambda: self._active == 0, timeout_s)

    def release_undelivered(self) -> None:
        """Release what was delivered but not taken; only after `halt`."""
        while True:
            try:
                filled = self._results.get_nowait()
            except queue.Empty:
                return
            if filled is not None:
                filled.release()
