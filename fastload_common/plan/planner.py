"""From what is needed to the requests that bring it. Pure: no I/O, no clock, no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from fastload_common.plan.extents import extents, merge
from fastload_common.plan.geometry import View
from fastload_common.plan.records import Chunk, Plan, TensorRead
from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["ALIGNMENT_BYTES", "plan_reads"]

# Chunks begin at multiples of this, so that what is aligned in the object is aligned in a
# staging slot (slots are page-aligned) and no element straddles two chunks. 64 is the widest
# vector load and a multiple of every element size.
ALIGNMENT_BYTES = 64


def plan_reads(reads: Sequence[TensorRead], *, chunk_bytes: int, merge_gap_bytes: int) -> Plan:
    """Plan the requests for a list of reads.

    Args:
        reads: in the order in which they will be wanted; chunks are asked for in that order.
        chunk_bytes: largest request; a multiple of ALIGNMENT_BYTES.
        merge_gap_bytes: read over gaps up to this long rather than ask twice.
    """
    if chunk_bytes % ALIGNMENT_BYTES or chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be a multiple of {ALIGNMENT_BYTES}: {chunk_bytes}")
    by_object: dict[ObjectId, list[_Wanted]] = {}
    # Gaps below the alignment are always merged: a chunk may begin that much earlier.
    gap_bytes = max(merge_gap_bytes, ALIGNMENT_BYTES - 1)
    for index, read in enumerate(reads):
        ranges = extents(read, merge_gap_bytes=gap_bytes)
        if ranges:
            by_object.setdefault(read.object_id, []).append(_Wanted(index, read, ranges))
    chunk_counts = [0] * len(reads)
    planned: list[tuple[Chunk, list[int]]] = []
    for object_id, wanted in by_object.items():
        planned += _plan_object(object_id, wanted, chunk_bytes, gap_bytes)
    planned.sort(key=lambda row: row[1][0])  # by who wants it first
    for _, readers in planned:
        for index in readers:
            chunk_counts[index] += 1
    return Plan(
        chunks=[chunk for chunk, _ in planned],
        readers=[readers for _, readers in planned],
        chunk_counts=chunk_counts,
        needed_bytes=sum(chunk.needed_bytes for chunk, _ in planned),
        fetched_bytes=sum(chunk.byte_range.size_bytes for chunk, _ in planned),
    )


class _Wanted(NamedTuple):
    number: int
    read: TensorRead
    ranges: list[tuple[int, int]]


def _plan_object(
    object_id: ObjectId, wanted: list[_Wanted], chunk_bytes: int, gap_bytes: int
) -> list[tuple[Chunk, list[int]]]:
    """The chunks of one object, each with the indices of its readers in ascending order."""
    spans = _cut(merge([span for row in wanted for span in row.ranges], gap_bytes), chunk_bytes)
    starts = [start for start, _ in spans]
    readers: list[list[int]] = [[] for _ in spans]
    used = [0] * len(spans)
    counted: set[tuple[int, int, View]] = set()
    for index, read, ranges in wanted:
        density = _density(read, ranges)
        # The same view read twice (tied weights, replicas) needs its bytes once.
        identity = (read.data_start, read.itemsize_bytes, read.view)
        fresh = identity not in counted
        counted.add(identity)
        for start, end in ranges:
            for k in range(bisect_right(starts, start) - 1, bisect_left(starts, end)):
                if fresh:
                    low, high = spans[k]
                    used[k] += round(density * (min(high, end) - max(low, start)))
                if not readers[k] or readers[k][-1] != index:
                    readers[k].append(index)
    return [
        (Chunk(object_id, ByteRange(start, end), min(max(needed, 1), end - start)), who)
        for (start, end), who, needed in zip(spans, readers, used, strict=True)
        if who  # a gap longer than a chunk leaves some that nobody reads
    ]


def _cut(ranges: list[tuple[int, int]], chunk_bytes: int) -> list[tuple[int, int]]:
    """Cut ranges to chunks that begin at aligned offsets (a range may begin a little earlier)."""
    spans: list[tuple[int, int]] = []
    for first, end in ranges:
        start = first - first % ALIGNMENT_BYTES
        while start < end:
            stop = min(end, start + chunk_bytes)
            spans.append((start, stop))
            start = stop
    return spans


def _density(read: TensorRead, ranges: list[tuple[int, int]]) -> float:
    """Needed bytes / bytes of the ranges, for one read."""
    count = 1
    for size, stride in zip(read.view.sizes, read.view.strides, strict=True):
        count *= size if stride else 1  # an expanded dimension costs nothing
    covered = sum(end - start for start, end in ranges)
    return min(1.0, count * read.itemsize_bytes / covered)
