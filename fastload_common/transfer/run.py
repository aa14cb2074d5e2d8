"""One fetch as its consumer sees it: what has arrived, what failed, how long it may take.

Shared by the consumer's thread and the pump's. After `halt` nothing is delivered any more: what
arrives late is released at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from fastload_common.clock import Clock
from fastload_common.errors import DeadlineError, SourceError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.units import format_size

__all__ = ["Filled", "Run", "Staging", "StagingSlot", "Supply"]

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

    @property
    def position_bytes(self) -> int: ...

    def release(self) -> None: ...


class Staging(Protocol):
    """What `fastload_common.staging.arena.Arena` offers; a neighbour that is not imported."""

    @property
    def slot_bytes(self) -> int: ...

    @property
    def fd(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_closed(self) -> bool: ...

    def populate(self, position_bytes: int, size_bytes: int) -> None: ...

    def try_lease(self, size_bytes: int) -> StagingSlot | None: ...


class Filled:
    """A fetched chunk in staging memory. Whoever got it must `release` it.

    Attributes:
        chunk: what was asked.
        data: exactly the chunk's bytes; valid until `release`.
    """

    __slots__ = ("_released", "_slot", "chunk", "data")

    def __init__(self, chunk: Chunk, slot: StagingSlot, released: Callable[[], None]) -> None:
        self.chunk = chunk
        self.data = slot.memory[: chunk.byte_range.size_bytes]
        self._slot = slot
        self._released = released

    @property
    def position_bytes(self) -> int:
        """Where the data begins in the arena's file."""
        return self._slot.position_bytes

    def release(self) -> None:
        """Give the memory back to the arena. Safe to call twice."""
        # Turns use after release into an error, except through views made from this one.
        with contextlib.suppress(BufferError):
            self.data.release()
        self._slot.release()
        self._released()


class Run:
    """One call of `Fetcher.fetch`.

    Args:
        chunks: all of them, in the order in which their requests begin.
        deadline_s: reading of the clock at which the load must have ended; None: never.
        limit_s: the configured duration that led to it, for the message.

    Attributes:
        complete: see `_is_complete`; a supply's.
        idle: set when no attempt of this run is left and all its memory is back, except what
            the consumer holds.
        in_flight: attempts that have not ended, for a message.
        released: called whenever the consumer gives memory back.
        missing: of chunks that a `Supply` has bytes of, by index: what the source is to bring.
        returned: chunks that a supply gives up, see `ask_for`.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        clock: Clock,
        *,
        deadline_s: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        self.chunks = chunks
        self.size_bytes = sum(chunk.byte_range.size_bytes for chunk in chunks)
        self.idle = threading.Event()
        self.in_flight = 0
        self.released: Callable[[], None] = _nothing
        self.missing: dict[int, Sequence[ByteRange]] = {}
        self.returned: deque[tuple[int, StagingSlot | None, Sequence[ByteRange]]] = deque()
        self.complete: Callable[[Chunk, StagingSlot], bool] = _is_complete
        self._stop = threading.Event()
        self._clock = clock
        self._deadline_s = deadline_s
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._results: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._last_fault: SourceError | None = None
        self._delivered_count = 0
        self._delivered_bytes = 0

    # Called by the pump.

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted: it failed, or its consumer left."""
        return self._stop.is_set()

    @property
    def delivered_bytes(self) -> int:
        return self._delivered_bytes

    def deliver(self, chunk: Chunk, slot: StagingSlot) -> None:
        """All that was asked of the source is in the memory."""
        if self._stop.is_set() or self.complete(chunk, slot):
            self.put(chunk, slot)

    def put(self, chunk: Chunk, slot: StagingSlot) -> None:
        """Hand a complete chunk over, with its memory. From any thread."""
        filled = Filled(chunk, slot, self.released)
        with self._lock:
            if not self._stop.is_set():
                self._delivered_count += 1
                self._delivered_bytes += len(filled.data)
                self._results.put(filled)
                return
        filled.release()

    def ask_for(self, index: int, slot: StagingSlot | None, ranges: Sequence[ByteRange]) -> None:
        """The source is to bring these too, into the chunk's memory if it has any. From any thread.

        The memory is the run's from now on.
        """
        with self._lock:
            if not self._stop.is_set():
                self.returned.append((index, slot, ranges))
                return
        if slot is not None:
            slot.release()

    def fail(self, error: BaseException) -> None:
        """End the run with this error; later ones become its notes."""
        with self._lock:
            self._failures.append(error)
            self._stop.set()
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
            f"{len(self.chunks)} ranges ({format_size(self._delivered_bytes)} of "
            f"{format_size(self.size_bytes)}) had arrived",
            hint="raise FASTLOAD_DEADLINE_S, or see why the store is slow",
            last_fault=None if fault is None else f"{type(fault).__name__}: {fault}",
        )

    # Called by the consumer.

    def next_filled(self) -> Filled:
        """The next chunk to arrive.

        Raises:
            BaseException: the first failure.
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
        """Hang all further failures on the first one; only when it is idle."""
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
                return self._results.get(timeout=0 if self.is_late() else poll_s)
            except queue.Empty:
                if self._failures:
                    return None  # whoever closed this from another thread took its wake-up away
                if self.is_late():
                    self.fail(self.deadline_error())
                    return None
            waited_s += poll_s
            if waited_s >= _STALL_WARNING_S:
                self._warn_of_stall(waited_s)
                waited_s = 0.0

    def _warn_of_stall(self, waited_s: float) -> None:
        with self._lock:
            missing = len(self.chunks) - self._delivered_count
        _log.warning(
            "no range has arrived for %.0f s: %d of %d ranges are there, %d requests in flight%s",
            waited_s,
            self._delivered_count,
            len(self.chunks),
            self.in_flight,
            f" ({missing} ranges wait for staging memory that whoever places holds)"
            if not self.in_flight
            else "",
        )

    def is_late(self) -> bool:
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s <= 0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk was delivered."""
        return self._delivered_count == len(self.chunks)

    def halt(self) -> None:
        """No more deliveries."""
        with self._lock:
            self._stop.set()

    def release_undelivered(self) -> None:
        """Release what was delivered but not taken; only after `halt`."""
        while self.returned:
            _, slot, _ = self.returned.popleft()
            if slot is not None:
                slot.release()
        while True:
            try:
                filled = self._results.get_nowait()
            except queue.Empty:
                return
            if filled is not None:
                filled.release()


class Supply(Protocol):
    """Brings bytes of a run from a place that is nearer than the source, by threads of its own."""

    def begin(self, run: Run) -> None:
        """Fill ``missing`` and ``complete``; before anything is asked of the source."""
        ...

    def start(self) -> None:
        """Bring it, from now on."""
        ...

    def end(self) -> None:
        """Nothing more is wanted; the run is halted."""
        ...


def _is_complete(chunk: Chunk, slot: StagingSlot) -> bool:
    """Whether a chunk is whole with what the source brought; False: somebody else goes on."""
    return True


def _nothing() -> None:
    """What to do when memory is given back: nobody waits for it."""
