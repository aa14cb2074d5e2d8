"""What of a run is still to be asked for, and in which order. No decisions about time.

Memory first, then the chunk: requests begin in the order given, and nobody waits for memory
that would not be needed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

from fastload_common.errors import StagingError
from fastload_common.ranges import ByteRange
from fastload_common.transfer.bandwidth import capped_part_bytes
from fastload_common.transfer.parts import OpenChunk, Part
from fastload_common.transfer.run import Run, Staging, StagingSlot
from fastload_common.transfer.sizing import part_bytes
from fastload_common.transfer.tuning import Tuning

__all__ = ["WorkQueue"]


class WorkQueue:
    """The chunks of one run that are not complete.

    Args:
        staging: memory for chunks.
        tuning: how large a request may be.

    Attributes:
        open: chunks that have memory, by their index in the run.
        starving: a chunk waits for memory.
    """

    def __init__(self, staging: Staging, tuning: Tuning) -> None:
        self._staging = staging
        self._tuning = tuning
        self._closed: deque[int] = deque()
        self._parts: deque[Part] = deque()
        self._waiting: list[tuple[float, int, Part]] = []
        self._turns = itertools.count()
        self._remaining_bytes = 0
        self.open: dict[int, OpenChunk] = {}
        self.starving = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing but what waits for its time is to be asked for."""
        return not (self._closed or self._parts)

    @property
    def due_s(self) -> float | None:
        """When the first of those that wait may be asked for."""
        return self._waiting[0][0] if self._waiting else None

    def begin(self, run: Run) -> None:
        missing = run.missing
        self._closed = deque(k for k in range(len(run.chunks)) if k not in missing or missing[k])
        self._remaining_bytes = sum(_size_bytes(run, k) for k in self._closed)

    def next_part(self, run: Run, now_s: float, connections: int) -> Part | None:
        """What failed and may be asked again, then parts of open chunks, then a new chunk."""
        if self._waiting and self._waiting[0][0] <= now_s:
            return heapq.heappop(self._waiting)[2]
        self.starving = False
        while run.returned:
            self._take_back(run, connections)
        if not self._parts and self._closed:
            self._open_next(run, connections)
        return self._parts.popleft() if self._parts else None

    def spare_slot(self, size_bytes: int) -> StagingSlot | None:
        """Memory for what can be done without; None: there is none."""
        try:
            return self._staging.try_lease(size_bytes)
        except StagingError:
            return None

    def put_back(self, part: Part) -> None:
        """It may not begin yet: it is the next one again."""
        self._parts.appendleft(part)

    def again(self, part: Part, at_s: float) -> None:
        """Ask for what is missing of it, not before ``at_s`` and not on a kept connection."""
        part.fresh = True
        heapq.heappush(self._waiting, (at_s, next(self._turns), part))

    def clear(self) -> None:
        """Nothing of it is wanted: memory goes back when nobody writes there."""
        self._closed.clear()
        self._parts.clear()
        self._waiting.clear()
        for chunk in self.open.values():
            chunk.given_up = True
            chunk.release_if_unused()
        self.open.clear()
        self.starving = False

    def _open_next(self, run: Run, connections: int) -> None:
        index = self._closed[0]
        size_bytes = run.chunks[index].byte_range.size_bytes
        slot = self._staging.try_lease(size_bytes)
        if slot is None:
            if self._staging.is_closed:
                run.fail(StagingError("the staging memory was closed while chunks were fetched"))
            self.starving = True
            return
        self._closed.popleft()
        self._open(run, index, slot, connections)

    def _take_back(self, run: Run, connections: int) -> None:
        """What was to come from elsewhere does not."""
        index, slot, ranges = run.returned.popleft()
        run.missing[index] = ranges
        self._remaining_bytes += _size_bytes(run, index)
        if slot is None:
            self._closed.append(index)
        else:
            self._open(run, index, slot, connections)

    def _open(self, run: Run, index: int, slot: StagingSlot, connections: int) -> None:
        chunk = self.open[index] = OpenChunk(run, index, slot)
        byte_range = run.chunks[index].byte_range
        step_bytes = part_bytes(
            chunk_bytes=byte_range.size_bytes,
            remaining_bytes=self._remaining_bytes,
            connections=connections,
            observed=self._tuning.observed,
        )
        cap = self._tuning.policy.max_bytes_per_s
        if cap is not None:
            step_bytes = capped_part_bytes(cap, step_bytes)
        self._remaining_bytes -= _size_bytes(run, index)
        for wanted in _wanted(run, index):
            for piece in wanted.pieces(step_bytes):
                start = piece.start - byte_range.start
                self._parts.append(Part(chunk, start, piece.size_bytes))
                chunk.unfinished += 1


def _wanted(run: Run, index: int) -> Sequence[ByteRange]:
    """What the source is to bring of a chunk."""
    return run.missing.get(index) or (run.chunks[index].byte_range,)


def _size_bytes(run: Run, index: int) -> int:
    return sum(byte_range.size_bytes for byte_range in _wanted(run, index))
