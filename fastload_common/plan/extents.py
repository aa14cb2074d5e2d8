"""From a strided view to the byte ranges that hold it, gaps merged where that is cheap. Pure."""

from __future__ import annotations

import math

from fastload_common.plan.geometry import ordered
from fastload_common.plan.records import TensorRead

__all__ = ["MOST_RUNS", "extents", "merge"]

# Of one read. Each run would be a request of its own (0.2 ms of CPU, a first byte of latency):
# reading over gaps is cheaper than ever more of them.
MOST_RUNS = 1 << 17


def extents(read: TensorRead, *, merge_gap_bytes: int) -> list[tuple[int, int]]:
    """Byte ranges ``(start, end)`` of the object that hold the view, ascending, disjoint.

    Two runs whose gap is at most merge_gap_bytes become one; and the innermost ones become one
    whatever the gap where there would be more than `MOST_RUNS`: so many requests cost more.
    """
    view, itemsize = read.view, read.itemsize_bytes
    if view.numel == 0:
        return []
    box = ordered(view.sizes, view.strides, view.strides)
    span = itemsize  # bytes of what is one extent so far, from the innermost outwards
    loops: list[tuple[int, int]] = []
    for size, stride in zip(reversed(box.sizes), reversed(box.src_strides), strict=True):
        step = stride * itemsize
        if not loops and step - span <= merge_gap_bytes:
            span += (size - 1) * step
        elif step:
            loops.append((size, step))
    while math.prod(size for size, _ in loops) > MOST_RUNS:
        size, step = loops.pop(0)
        span += (size - 1) * step
    starts = [read.data_start + view.offset * itemsize]
    for size, step in reversed(loops):
        starts = [start + i * step for start in starts for i in range(size)]
    return merge([(start, start + span) for start in starts], merge_gap_bytes)


def merge(ranges: list[tuple[int, int]], gap_bytes: int) -> list[tuple[int, int]]:
    """Sort ranges and join those that overlap, touch, or are at most gap_bytes apart."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start - merged[-1][1] <= gap_bytes:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
