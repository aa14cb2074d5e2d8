"""A scheduler over lanes and memory that a test moves by hand. No threads, no time of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastload_common.errors import SourceError, SourceUnavailableError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receipt
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.transfer.hedging import Crowd, Flight, HedgeBudget, Verdict
from fastload_common.transfer.lanes import Attempt, Done, Failed, Progress, Started
from fastload_common.transfer.observed import Observed
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.run import Filled, Run
from fastload_common.transfer.scheduler import Scheduler
from fastload_common.transfer.stats import TransferStats
from fastload_common.transfer.tuning import Tuning, make_tuning

SIZE_BYTES = 1 << 20
OBJECT = ObjectId("s3://bucket/object", '"etag"', SIZE_BYTES)


def content(byte_range: ByteRange) -> bytes:
    """What the object has there."""
    return bytes((k * 31 + (k >> 8)) & 0xFF for k in range(byte_range.start, byte_range.end))


def chunk(start: int, end: int) -> Chunk:
    return Chunk(OBJECT, ByteRange(start, end), end - start)


class HandSlot:
    """A slot that knows whether it was given back, and by whom it is written."""

    def __init__(self, memory: HandMemory, index: int, size_bytes: int) -> None:
        self._owner = memory
        self.index = index
        self.position_bytes = index * memory.slot_bytes
        self._buffer = bytearray(b"\xee" * size_bytes)
        self.memory = memoryview(self._buffer)
        self.is_leased = True

    def release(self) -> None:
        if self.is_leased:
            self.is_leased = False
            self._owner.released(self)


class HandMemory:
    """So many slots; refuses to take one back that somebody still writes to."""

    def __init__(self, slot_bytes: int, slot_count: int) -> None:
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.is_closed = False
        self.fd = -1
        self.size_bytes = slot_bytes * slot_count
        self.leased: dict[int, HandSlot] = {}
        self.lanes: HandLanes | None = None

    def populate(self, position_bytes: int, size_bytes: int) -> None:
        pass

    def try_lease(self, size_bytes: int) -> HandSlot | None:
        assert 0 < size_bytes <= self.slot_bytes
        free = [k for k in range(self.slot_count) if k not in self.leased]
        if not free or self.is_closed:
            return None
        slot = self.leased[free[0]] = HandSlot(self, free[0], size_bytes)
        return slot

    def released(self, slot: HandSlot) -> None:
        del self.leased[slot.index]
        assert self.lanes is not None
        for attempt in self.lanes.live.values():
            at = attempt.position_bytes // self.slot_bytes
            assert at != slot.index, f"slot {at} was given back while it is written to"


class HandLanes:
    """Attempts wait here until the test lets something happen to them."""

    def __init__(self) -> None:
        self.live: dict[int, Attempt] = {}
        self.all: list[Attempt] = []
        self.cancelled: list[int] = []
        self.limit = 0

    def start(self, attempt: Attempt) -> None:
        assert len(attempt.memory) == attempt.byte_range.size_bytes > 0
        self.live[attempt.id] = attempt
        self.all.append(attempt)

    def cancel(self, attempt_id: int) -> None:
        assert attempt_id not in self.cancelled, "cancelled twice"
        self.cancelled.append(attempt_id)

    def flush(self) -> None:
        pass

    def set_limit(self, connections: int) -> None:
        self.limit = connections

    def close(self) -> None:
        pass


class Verdicts:
    """Stands for the slow policy: says what the test wants."""

    def __init__(self) -> None:
        self.next: dict[int, Verdict] = {}
        self.seen: list[tuple[Flight, bool]] = []
        self.always = Verdict.WAIT

    def judge(
        self, now_s: float, flight: Flight, observed: Observed, *, idle: bool, crowd: Crowd
    ) -> Verdict:
        self.seen.append((flight, idle))
        return self.always


class Bench:
    """Everything together; ``now_s`` moves by `at`."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        slots: int = 8,
        slot_bytes: int = SIZE_BYTES,
        policy: TransferPolicy | None = None,
        deadline_s: float | None = None,
        random: Any = lambda: 0.5,
    ) -> None:
        self.clock = FakeClock(start_s=0.0)
        self.policy = policy or TransferPolicy(4, 3, 5, 5)
        self.lanes = HandLanes()
        self.memory = HandMemory(slot_bytes, slots)
        self.memory.lanes = self.lanes
        self.verdicts = Verdicts()
        self.tuning: Tuning = make_tuning(self.policy, self.clock, random)
        self.tuning.slow = self.verdicts  # type: ignore[assignment]
        self.tuning.hedges = HedgeBudget(share=1.0, floor_bytes=1 << 40, at_once=100)
        self.stats = TransferStats()
        self.scheduler = Scheduler(self.lanes, self.memory, self.tuning, self.stats)
        self.run = Run(chunks, self.clock, deadline_s=deadline_s, limit_s=deadline_s)
        self.scheduler.begin(self.run)
        self.due_s = self.scheduler.step(0.0)

    def at(self, now_s: float, *events: Any) -> None:
        """Move the time, hand over events, let the scheduler act."""
        self.clock.advance(now_s - self.clock.monotonic_s())
        self.scheduler.handle(events, now_s)
        self.due_s = self.scheduler.step(now_s)

    # What lanes would say

    def started(self, attempt_id: int) -> Started:
        return Started(attempt_id, self.clock.monotonic_s())

    def progress(self, attempt_id: int, received_bytes: int) -> Progress:
        self.write(attempt_id, received_bytes)
        return Progress(attempt_id, self.clock.monotonic_s(), received_bytes, 0.01)

    def done(self, attempt_id: int) -> Done:
        attempt = self.lanes.live[attempt_id]
        size_bytes = attempt.byte_range.size_bytes
        self.write(attempt_id, size_bytes)
        del self.lanes.live[attempt_id]
        receipt = Receipt(size_bytes, 0.01, 0.1, new_connection=False)
        return Done(attempt_id, self.clock.monotonic_s(), receipt)

    def failed(
        self, attempt_id: int, good_bytes: int = 0, error: BaseException | None = None
    ) -> Failed:
        self.write(attempt_id, good_bytes)
        del self.lanes.live[attempt_id]
        error = error or SourceUnavailableError("it failed")
        if isinstance(error, SourceError):
            error.received_bytes = good_bytes
        cancelled = attempt_id in self.lanes.cancelled
        return Failed(attempt_id, self.clock.monotonic_s(), error, cancelled)

    def write(self, attempt_id: int, size_bytes: int) -> None:
        """Let an attempt write its first bytes."""
        attempt = self.lanes.live[attempt_id]
        start = attempt.byte_range.start
        attempt.memory[:size_bytes] = content(ByteRange(start, start + size_bytes))

    # What a consumer sees

    def arrived(self) -> list[Filled]:
        """Everything delivered so far, checked."""
        found = []
        while not self.run._results.empty():
            filled = self.run.next_filled()
            assert bytes(filled.data) == content(filled.chunk.byte_range)
            found.append(filled)
        return found
