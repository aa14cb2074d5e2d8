"""From strided views to the byte ranges that hold them, exactly or with short gaps merged. Pure.

100,000 views are a matter of a second: Python looks at each once, numpy does the rest. A view is
kept as *combs*: runs of one length at one distance. One run for a contiguous slice, one comb for
a slice of columns, several for what has more loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fastload_common.plan.geometry import ordered
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId

__all__ = ["MOST_RUNS", "MOST_SPANS", "Combs", "Ints", "ReadTable", "merge_spans", "ranges_of"]

Ints = npt.NDArray[np.int64]

# Of one read. Each run would be a request of its own (0.2 ms of CPU, a first byte of latency):
# reading over gaps is cheaper than ever more of them.
MOST_RUNS = 1 << 17
# Of one read, where runs are not counted: what has more loops than any weight's slice.
_MOST_COMBS = 1 << 14
# Of all reads together: 8 MiB of numbers. 100,000 slices make 100,000.
MOST_SPANS = 1 << 19


@dataclass(frozen=True, slots=True)
class Combs:
    """Comb i: `count[i]` runs of `run[i]` bytes, `step[i]` apart, the first at `start[i]`.

    Attributes:
        read: which read it belongs to.
        object_index: in the table's objects.
        start, run, step, count: bytes of the object; runs of one comb never overlap.
    """

    read: Ints
    object_index: Ints
    start: Ints
    run: Ints
    step: Ints
    count: Ints

    @property
    def end(self) -> Ints:
        ends: Ints = self.start + (self.count - 1) * self.step + self.run
        return ends

    def below(self, which: Ints, position: Ints) -> Ints:
        """How many bytes of the combs `which` lie below positions (each in its own object)."""
        start, run, step = self.start[which], self.run[which], self.step[which]
        behind = np.maximum(position - start, 0)
        turn = np.minimum(behind // step, self.count[which] - 1)
        below: Ints = turn * run + np.minimum(behind - turn * step, run)
        return below

    def spans(self) -> tuple[Ints, Ints, Ints]:
        """All runs: object index, start, end; in no order."""
        begin = np.repeat(self.start, self.count)
        begin += ranges_of(self.count) * np.repeat(self.step, self.count)
        return (
            np.repeat(self.object_index, self.count),
            begin,
            begin + np.repeat(self.run, self.count),
        )


class ReadTable:
    """Reads as numbers.

    Args:
        reads: what somebody needs; empty ones may be among them.
        objects: indices that objects shall have; more are added behind them as they come.

    Attributes:
        objects: the objects, in the order of their indices.
    """

    def __init__(self, reads: Sequence[TensorRead], objects: Sequence[ObjectId] = ()) -> None:
        self.objects = list(objects)
        index_of = {object_id: k for k, object_id in enumerate(self.objects)}
        by_identity = {id(object_id): k for k, object_id in enumerate(self.objects)}
        shapes: dict[tuple[tuple[int, ...], tuple[int, ...], int], int] = {}
        rows: list[tuple[int, int, int]] = []
        for read in reads:
            object_id, (sizes, strides, offset) = read.object_id, read.view
            itemsize = read.itemsize_bytes
            # Hashing an object's identity is slow, and reads of one tensor file share it.
            index = by_identity.get(id(object_id))
            if index is None:
                index = index_of.setdefault(object_id, len(index_of))
                if index == len(self.objects):
                    self.objects.append(object_id)
                by_identity[id(object_id)] = index
            shape = shapes.setdefault((sizes, strides, itemsize), len(shapes))
            rows.append((index, read.data_start + offset * itemsize, shape))
        self._shapes = list(shapes)
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._object, self._base, self._shape = table[:, 0], table[:, 1], table[:, 2]

    def __len__(self) -> int:
        return len(self._base)

    def first_of_equals(self) -> npt.NDArray[np.bool_]:
        """For each read, whether no earlier one is the same view of the same bytes."""
        order = np.lexsort((np.arange(len(self)), self._shape, self._base, self._object))
        first = np.ones(len(self), dtype=bool)
        columns = [column[order] for column in (self._object, self._base, self._shape)]
        same = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
        first[order[1:][same]] = False
        return first

    def needed_bytes(self) -> int:
        """Bytes of all reads, the same view once; distinct views that overlap count twice."""
        sizes = np.array([_size_bytes(*shape) for shape in self._shapes], dtype=np.int64)
        return int(sizes[self._shape[self.first_of_equals()]].sum()) if len(self) else 0

    def combs(self, gap_bytes: int = 0, most_runs: int | None = None) -> Combs:
        """The combs of all reads.

        Args:
            gap_bytes: runs of one view that are no farther apart become one.
            most_runs: of one view; the innermost ones become one whatever the gap where there
                would be more.
        """
        of_shape = [_combs_of(*shape, gap_bytes, most_runs) for shape in self._shapes]
        counts = np.array([len(rows) for rows in of_shape], dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        flat = np.array([row for rows in of_shape for row in rows], dtype=np.int64).reshape(-1, 4)
        each = counts[self._shape]
        rows = np.repeat(firsts[self._shape], each) + ranges_of(each)
        start, run, step, count = flat[rows].T
        return Combs(
            np.repeat(np.arange(len(self)), each),
            np.repeat(self._object, each),
            np.repeat(self._base, each) + start,
            run,
            step,
            count,
        )

    def spans(self, gap_bytes: int) -> list[Ints]:
        """For each object the ranges that its reads need, as rows [start, end).

        Ascending; none nearer to the next than gap_bytes + 1. Where there would be more than
        `MOST_RUNS` of a read, or `MOST_SPANS` in all (however many reads), longer gaps are merged.
        """
        combs = self.combs(gap_bytes, MOST_RUNS)
        while int(combs.count.sum()) > max(MOST_SPANS, len(self)):
            gap_bytes = max(2 * gap_bytes, 64)
            combs = self.combs(gap_bytes, MOST_RUNS)
        objects, starts, ends = combs.spans()
        order = np.argsort(objects, kind="stable")
        borders = np.searchsorted(objects[order], np.arange(len(self.objects) + 1))
        found = []
        for first, last in pairwise(borders):
            which = order[first:last]
            found.append(merge_spans(starts[which], ends[which], gap_bytes))
        while sum(map(len, found)) > max(MOST_SPANS, len(found)):
            gap_bytes = max(2 * gap_bytes, 64)
            found = [merge_spans(rows[:, 0], rows[:, 1], gap_bytes) for rows in found]
        return found


def merge_spans(starts: Ints, ends: Ints, gap_bytes: int) -> Ints:
    """Ranges that overlap, touch, or are at most gap_bytes apart, joined: rows [start, end)."""
    if not len(starts):
        return np.empty((0, 2), dtype=np.int64)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    firsts = np.flatnonzero(starts[1:] - ends[:-1] > gap_bytes) + 1
    return np.stack(
        (starts[np.concatenate(([0], firsts))], ends[np.concatenate((firsts - 1, [-1]))]), axis=1
    )


def ranges_of(counts: Ints) -> Ints:
    """0, 1, ... count - 1 for each count, one behind the other."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)


def _size_bytes(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes of a view; an expanded dimension costs nothing."""
    return itemsize * math.prod(
        size if stride or not size else 1 for size, stride in zip(sizes, strides, strict=True)
    )


def _combs_of(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    gap_bytes: int,
    most_runs: int | None,
) -> list[tuple[int, int, int, int]]:
    """A view at offset 0 as combs: start, run, step, count; in bytes."""
    if 0 in sizes:
        return []
    box = ordered(sizes, strides, strides)
    span = itemsize  # bytes of what is one run so far, from the innermost outwards
    loops: list[tuple[int, int]] = []
    for size, stride in zip(reversed(box.sizes), reversed(box.src_strides), strict=True):
        step = stride * itemsize
        if not loops and step - span <= gap_bytes:
            span += (size - 1) * step
        elif step:
            loops.append((size, step))
    while loops and (_too_many(loops, most_runs) or loops[0][1] - span <= gap_bytes):
        size, step = loops.pop(0)
        span += (size - 1) * step
    if not loops:
        return [(0, span, span, 1)]
    # Any loop may be the comb; with the longest one there are the fewest combs.
    count, step = max(loops)
    loops.remove((count, step))
    starts = [0]
    for other, distance in reversed(loops):
        starts = [start + i * distance for start in starts for i in range(other)]
    return [(start, span, step, count) for start in starts]


def _too_many(loops: Sequence[tuple[int, int]], most_runs: int | None) -> bool:
    runs = math.prod(size for size, _ in loops)
    if most_runs is not None and runs > most_runs:
        return True
    return runs // max(size for size, _ in loops) > _MOST_COMBS
