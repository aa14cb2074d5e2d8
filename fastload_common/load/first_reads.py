"""What the first reads of a load took: its index and headers, which come before the plan."""

from __future__ import annotations

import threading
from dataclasses import asdict

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.load.report import LoadReport
from fastload_common.plan.cost import PathCost, observe
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.borrowed import BorrowedSource

__all__ = ["FirstReads", "choose_gap", "usual_gap"]


class FirstReads:
    """Times reads; from any thread.

    Args:
        clock: time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reads: list[tuple[int, float]] = []

    def watch(self, source: ObjectSource) -> ObjectSource:
        """The same source, whose successful small reads are timed. Closing it closes nothing."""
        return _Watched(source, self)

    def cost(self) -> PathCost:
        """What a request costs, as far as they tell."""
        with self._lock:
            return observe(self._reads)

    def add(self, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._reads.append((size_bytes, seconds))

    def now_s(self) -> float:
        return self._clock.monotonic_s()


class _Watched(BorrowedSource):
    """Tells how long reads took."""

    def __init__(self, source: ObjectSource, reads: FirstReads) -> None:
        super().__init__(source)
        self._reads = reads

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        started_s = self._reads.now_s()
        data = super().read(object_id, byte_range)
        self._reads.add(len(data), self._reads.now_s() - started_s)
        return data


def choose_gap(settings: Settings, reads: FirstReads, report: LoadReport) -> int:
    """The longest gap to read over: what is set, or what costs as much as a request. Reported."""
    cost = reads.cost()
    gap_bytes = cost.gap_bytes if settings.merge_gap_bytes is None else settings.merge_gap_bytes
    report.merge_gap = {"bytes": gap_bytes, **asdict(cost)}
    return gap_bytes


def usual_gap(settings: Settings) -> int:
    """The same where nothing is observed."""
    gap_bytes = settings.merge_gap_bytes
    return PathCost().gap_bytes if gap_bytes is None else gap_bytes
