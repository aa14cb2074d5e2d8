"""What the scheduler knows of chunks in work. Plain state, no decisions.

A chunk has one staging slot and is fetched as one or more parts, each of which is one range. A part
has at most two racers: the primary, which writes into the chunk's slot, and a hedge, which
writes into a slot of its own, so that a loser's late bytes never land in memory that is in use.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.source.uri import is_file_uri
from fastload_common.transfer.hedging import Flight, RateMeter
from fastload_common.transfer.run import Run, StagingSlot

__all__ = ["OpenChunk", "Part", "Racer"]


@dataclass(slots=True, eq=False)
class OpenChunk:
    """A chunk whose memory is leased.

    Attributes:
        index: its place in the run.
        unfinished: parts that are not complete.
        writers: racers that may write into its slot.
        given_up: nobody wants it; the last writer to end gives the memory back.
    """

    run: Run
    index: int
    slot: StagingSlot
    unfinished: int = 0
    writers: int = 0
    given_up: bool = False

    @property
    def chunk(self) -> Chunk:
        return self.run.chunks[self.index]

    def release_if_unused(self) -> None:
        if self.given_up and not self.writers:
            self.slot.release()


@dataclass(slots=True, eq=False)
class Part:
    """One range of a chunk.

    Attributes:
        start_bytes: where it begins within the chunk.
        done_bytes: so many bytes from its start are good and in the chunk's slot.
        attempts: requests made for it.
        counted: failures that brought less than ``progress_bytes``.
        kills: attempts that we ended ourselves.
        fresh: the next request must not use a kept connection.
        winner: a hedge that has all the bytes, while the primary is being ended.
        is_over: all its bytes are good.
    """

    chunk: OpenChunk
    start_bytes: int
    size_bytes: int
    done_bytes: int = 0
    attempts: int = 0
    counted: int = 0
    kills: int = 0
    fresh: bool = False
    primary: Racer | None = None
    hedge: Racer | None = None
    winner: Racer | None = None
    is_over: bool = False

    @property
    def missing_bytes(self) -> int:
        return self.size_bytes - self.done_bytes

    def range_from(self, base_bytes: int) -> ByteRange:
        """What is missing from ``base_bytes`` on, in the object."""
        start = self.chunk.chunk.byte_range.start + self.start_bytes
        return ByteRange(start + base_bytes, start + self.size_bytes)

    def memory_from(self, base_bytes: int) -> memoryview:
        start = self.start_bytes
        return self.chunk.slot.memory[start + base_bytes : start + self.size_bytes]

    def take_from(self, racer: Racer, good_bytes: int) -> int:
        """Copy what a hedge has beyond ``done_bytes``; only when no primary writes. How much."""
        assert racer.slot is not None
        end = racer.base_bytes + good_bytes
        if not racer.base_bytes <= self.done_bytes < end:
            return 0
        begin = self.done_bytes
        memory = racer.slot.memory
        self.memory_from(begin)[: end - begin] = memory[
            begin - racer.base_bytes : end - racer.base_bytes
        ]
        self.done_bytes = end
        return end - begin


@dataclass(slots=True, eq=False)
class Racer:
    """An attempt, from its start to its end.

    Attributes:
        base_bytes: where its range begins within the part.
        slot: its own memory if it is a hedge, else None.
        memory: where it writes.
        started_s: when a connection took it up; None while it waits for one.
        killed: why it was ended by us, for the error; empty if it was not.
    """

    attempt_id: int
    part: Part
    base_bytes: int
    size_bytes: int
    slot: StagingSlot | None = None
    started_s: float | None = None
    received_bytes: int = 0
    first_byte_s: float | None = None
    last_progress_s: float = 0.0
    cancelled: bool = False
    killed: str = ""
    meter: RateMeter = field(default_factory=RateMeter)
    memory: memoryview | None = None

    @property
    def is_hedge(self) -> bool:
        return self.slot is not None

    def end(self) -> None:
        """It writes nowhere any more; its part is without it."""
        if self.part.primary is self:
            self.part.primary = None
        if self.part.hedge is self:
            self.part.hedge = None
        if self.memory is not None:
            # Whoever still holds the attempt, such as an error's traceback, holds no memory by it.
            with contextlib.suppress(BufferError):
                self.memory.release()

    def start(self, at_s: float) -> None:
        self.started_s = self.last_progress_s = at_s
        self.meter.add(at_s, 0)

    def restart(self) -> None:
        """What came so far does not count, and it waits for a connection again."""
        self.started_s = self.first_byte_s = None
        self.received_bytes = 0
        self.meter = RateMeter()

    def progress(self, at_s: float, received_bytes: int, first_byte_s: float) -> None:
        if self.started_s is None:
            self.start(at_s - first_byte_s)
        self.received_bytes = max(self.received_bytes, min(received_bytes, self.size_bytes))
        self.first_byte_s = first_byte_s
        self.last_progress_s = at_s
        self.meter.add(at_s, self.received_bytes)

    def flight(self, now_s: float) -> Flight | None:
        """As a judge sees it; None while it is not on the wire, or where there is none.

        A file is read in one piece, and asking its disk twice does not help.
        """
        if self.started_s is None or is_file_uri(self.part.chunk.chunk.object_id.uri):
            return None
        return Flight(
            started_s=self.started_s,
            size_bytes=self.size_bytes,
            received_bytes=self.received_bytes,
            first_byte_s=self.first_byte_s,
            last_progress_s=self.last_progress_s,
            rate_bytes_per_s=self.meter.rate_bytes_per_s(now_s),
            hedged=self.part.hedge is not None,
            kills=self.part.kills,
        )
