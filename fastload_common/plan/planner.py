"""From what is needed to the requests that bring it. Pure: no I/O, no clock, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fastload_common.plan.cutting import ALIGNMENT_BYTES, Line, check_chunk_bytes, cut
from fastload_common.plan.extents import Ints, ReadTable, ranges_of
from fastload_common.plan.records import Chunk, Plan, TensorRead
from fastload_common.ranges import ByteRange

__all__ = ["ALIGNMENT_BYTES", "plan_for", "plan_reads"]


def plan_reads(reads: Sequence[TensorRead], *, chunk_bytes: int, merge_gap_bytes: int) -> Plan:
    """Plan the requests for a list of reads.

    Args:
        reads: in the order in which they will be wanted; chunks are asked for in that order.
        chunk_bytes: largest request; a multiple of ALIGNMENT_BYTES.
        merge_gap_bytes: read over gaps up to this long rather than ask twice.
    """
    check_chunk_bytes(chunk_bytes)
    table = ReadTable(reads)
    # Gaps below the alignment are always merged: a chunk may begin that much earlier.
    spans = table.spans(max(merge_gap_bytes, ALIGNMENT_BYTES - 1))
    line = Line([int(rows[-1, 1]) if len(rows) else 0 for rows in spans])
    ranges = np.concatenate([line.put(k, rows) for k, rows in enumerate(spans)] or [_NO_ROWS])
    starts, ends, _ = cut(ranges[:, 0], ranges[:, 1], chunk_bytes)
    readers, used = _readers(table, line, starts, ends)
    # A gap longer than a chunk leaves some that nobody reads.
    order = sorted((k for k, who in enumerate(readers) if who), key=lambda k: readers[k][0])
    objects, offsets = line.take(starts)
    rows = list(zip(objects.tolist(), offsets.tolist(), (ends - starts).tolist(), strict=True))
    chunks = []
    for k in order:
        index, start, size = rows[k]
        byte_range = ByteRange(start, start + size)
        chunks.append(Chunk(table.objects[index], byte_range, used[k]))
    return _plan(chunks, [readers[k] for k in order], [used[k] for k in order], len(reads))


def plan_for(reads: Sequence[TensorRead], chunks: Sequence[Chunk]) -> Plan:
    """Find the readers of chunks that somebody else planned.

    Args:
        reads: in the order in which they will be wanted.
        chunks: in any order; they hold every byte of the reads, and more. Where one begins before
            the end of another, it does so by less than ALIGNMENT_BYTES.

    Returns:
        The same chunks in the same order. Those that no read takes bytes from have no readers.

    Raises:
        ValueError: the chunks lack bytes of a read.
    """
    table = ReadTable(reads)
    index_of = {object_id: k for k, object_id in enumerate(table.objects)}
    known = {id(object_id): k for k, object_id in enumerate(table.objects)}
    rows = []
    for number, chunk in enumerate(chunks):
        object_id, byte_range = chunk.object_id, chunk.byte_range
        index = known.get(id(object_id))
        if index is None:
            index = known[id(object_id)] = index_of.get(object_id, -1)
        if index >= 0:
            rows.append((index, byte_range.start, byte_range.end, number))
    mine = np.array(rows, dtype=np.int64).reshape(-1, 4)
    mine = mine[np.lexsort((mine[:, 1], mine[:, 0]))]
    combs = table.combs()
    lengths = np.zeros(len(table.objects), dtype=np.int64)
    np.maximum.at(lengths, mine[:, 0], mine[:, 2])
    np.maximum.at(lengths, combs.object_index, combs.end)
    line = Line(lengths.tolist())
    bases = line.bases[mine[:, 0]]
    found, counted = _readers(table, line, bases + mine[:, 1], bases + mine[:, 2])
    readers: list[list[int]] = [[] for _ in chunks]
    used = [0] * len(chunks)
    for number, who, size in zip(mine[:, 3].tolist(), found, counted, strict=True):
        readers[number], used[number] = who, size
    return _plan(list(chunks), readers, used, len(reads))


_NO_ROWS = np.empty((0, 2), dtype=np.int64)


def _plan(chunks: list[Chunk], readers: list[list[int]], used: list[int], reads: int) -> Plan:
    counts = [0] * reads
    for who in readers:
        for index in who:
            counts[index] += 1
    return Plan(
        chunks=chunks,
        readers=readers,
        chunk_counts=counts,
        needed_bytes=sum(used),
        fetched_bytes=sum(chunk.byte_range.size_bytes for chunk in chunks),
    )


def _readers(
    table: ReadTable, line: Line, starts: Ints, ends: Ints
) -> tuple[list[list[int]], list[int]]:
    """Who takes bytes from each chunk, ascending, and how many bytes are taken.

    Args:
        starts, ends: of the chunks, on the line, ascending.
    """
    combs = table.combs()
    bases = line.bases[combs.object_index]
    # What two chunks hold is taken from the first one.
    ends_so_far = np.maximum.accumulate(ends) if len(ends) else ends
    lows = np.maximum(starts, np.concatenate(([0], ends_so_far[:-1]))) if len(ends) else starts
    first = np.searchsorted(ends_so_far, bases + combs.start, side="right")
    last = np.searchsorted(lows, bases + combs.end, side="left")
    pairs = np.maximum(last - first, 0)
    comb = np.repeat(np.arange(len(pairs)), pairs)
    chunk = np.repeat(first, pairs) + ranges_of(pairs)
    base = bases[comb]
    taken = combs.below(comb, np.maximum(ends[chunk], lows[chunk]) - base)
    taken -= combs.below(comb, lows[chunk] - base)
    lacking = np.flatnonzero(
        np.bincount(comb, weights=taken, minlength=len(pairs)) < combs.run * combs.count
    )
    if len(lacking):
        raise ValueError(f"the chunks do not hold all bytes of read {combs.read[lacking[0]]}")
    some = taken > 0
    comb, chunk, taken = comb[some], chunk[some], taken[some]
    read = combs.read[comb]
    fresh = table.first_of_equals()[read]
    used = np.bincount(chunk[fresh], weights=taken[fresh], minlength=len(starts)).astype(np.int64)
    used = np.minimum(used, ends - starts)
    order = np.lexsort((read, chunk))
    read, chunk = read[order], chunk[order]
    if len(read):
        once = np.concatenate(([True], (read[1:] != read[:-1]) | (chunk[1:] != chunk[:-1])))
        read, chunk = read[once], chunk[once]
    borders = np.searchsorted(chunk, np.arange(len(starts) + 1)).tolist()
    who = read.tolist()
    return [who[a:b] for a, b in pairwise(borders)], used.tolist()
