"""Who of the ranks of one host fetches what, so that each byte is fetched once. Pure.

Every rank computes the same plan from the same needs; no message is needed to agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastload_common.plan.cutting import ALIGNMENT_BYTES, Line, check_chunk_bytes, cut
from fastload_common.plan.extents import Ints, merge_spans
from fastload_common.plan.needs import Needs

__all__ = ["NodeChunk", "NodePlan", "plan_node"]

# Where the set of consumers changes, a chunk ends if both sides are at least half of one.
_LEAST_SHARE = 2


@dataclass(frozen=True, slots=True)
class NodeChunk:
    """One range that one rank fetches, for itself or for others too.

    Attributes:
        object_index: in the agreed table.
        start, end: not empty; start is a multiple of `ALIGNMENT_BYTES`.
        owner: the rank that fetches it; one of the consumers.
        consumers: ranks whose needs lie in it, ascending.
    """

    object_index: int
    start: int
    end: int
    owner: int
    consumers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """All chunks of the ranks of one host.

    Attributes:
        chunks: ascending by object and start; disjoint, but that one may begin up to
            ALIGNMENT_BYTES - 1 before the end of the one before it.
        fetched_bytes: of all chunks.
        needed_bytes: of them in the spans of at least one rank.
        shared_bytes: of chunks that more than one rank consumes.
        fetched_by_rank: bytes of the chunks that each rank owns.
        received_by_rank: bytes of the chunks that each rank consumes and another one owns.
    """

    chunks: list[NodeChunk]
    fetched_bytes: int
    needed_bytes: int
    shared_bytes: int
    fetched_by_rank: tuple[int, ...]
    received_by_rank: tuple[int, ...]


def plan_node(
    needs: Sequence[Needs], *, chunk_bytes: int, gap_bytes: int, by_object: bool = False
) -> NodePlan:
    """Divide what the ranks of a host need among them.

    What any of them needs is cut to chunks. A chunk ends where the set of ranks that need the
    bytes changes, unless that would leave less than half a chunk (or than a gap that is
    read over) on one side: so a large slice for one rank goes to this rank alone, and small ones
    of several ranks come by one request. Each chunk is fetched by that consumer that has the least
    to fetch so far.

    Args:
        needs: of each rank, all for the same objects.
        chunk_bytes: largest chunk; a multiple of ALIGNMENT_BYTES. All ranks must give the same.
        gap_bytes: gaps up to so long are read over. All ranks must give the same.
        by_object: one owner for all chunks of an object. It then consumes all of them.

    Raises:
        ValueError: the needs are not of the same number of objects, or their bytes are too many.
    """
    check_chunk_bytes(chunk_bytes)
    objects = len(needs[0].spans) if needs else 0
    if any(len(need.spans) != objects for need in needs):
        raise ValueError("the ranks' needs are of different numbers of objects")
    # Gaps below the alignment are always merged: a chunk may begin that much earlier.
    gap_bytes = max(gap_bytes, ALIGNMENT_BYTES - 1)
    line = Line(
        (
            max((int(need.spans[k][-1, 1]) for need in needs if len(need.spans[k])), default=0)
            for k in range(objects)
        ),
        apart_bytes=gap_bytes + ALIGNMENT_BYTES,
    )
    ranks = [_on_line(need, line) for need in needs]
    together = np.concatenate(ranks) if ranks else np.empty((0, 2), dtype=np.int64)
    union = merge_spans(together[:, 0], together[:, 1], 0)
    least_bytes = max(gap_bytes, chunk_bytes // _LEAST_SHARE)
    first, end = _segments(_borders(together), union, gap_bytes, least_bytes)
    first, end = _join_equal(first, end, ranks)
    starts, ends, segment = cut(first, end, chunk_bytes)
    # Bytes before the segment are in the chunk before it, for whoever needs them.
    wanted = _wanted(ranks, np.maximum(starts, first[segment]), ends)
    some = wanted.any(axis=1)  # a gap longer than a chunk leaves some that nobody needs
    starts, ends = _trim(starts[some], ends[some], union)
    return _plan(
        line, starts, ends, wanted[some], int((union[:, 1] - union[:, 0]).sum()), by_object
    )


def _on_line(need: Needs, line: Line) -> Ints:
    rows = [line.put(k, spans) for k, spans in enumerate(need.spans) if len(spans)]
    return np.concatenate(rows) if rows else np.empty((0, 2), dtype=np.int64)


def _borders(spans: Ints) -> Ints:
    """All starts and ends, ascending, each once (`np.unique` is several times slower)."""
    borders = np.sort(spans, axis=None)
    return (
        borders[np.concatenate(([True], borders[1:] != borders[:-1]))] if len(borders) else borders
    )


def _segments(borders: Ints, union: Ints, gap_bytes: int, least_bytes: int) -> tuple[Ints, Ints]:
    """Ranges to cut on their own: not one chunk may hold bytes of two of them.

    Args:
        borders: where any rank's needs begin or end, ascending: between two of them the set of
            ranks is the same.
        union: what is needed at all.
    """
    if not len(borders):
        return borders, borders
    starts, ends = borders[:-1], borders[1:]
    place = np.searchsorted(union[:, 0], starts, side="right") - 1
    needed = starts < union[place, 1]
    kept = needed | (ends - starts <= gap_bytes)
    starts, ends = starts[kept], ends[kept]
    begins_block = np.concatenate(([True], starts[1:] != ends[:-1]))
    large = ends - starts >= least_bytes
    # A group is one large range, or all small ones between two of them.
    begins = begins_block | large | np.concatenate(([True], large[:-1]))
    group = np.flatnonzero(begins)
    begins_block = begins_block[group]
    starts, ends = starts[group], np.concatenate((ends[group[1:] - 1], ends[-1:]))
    small = ends - starts < least_bytes
    # A small group goes with the large range before it, or, if it is the first, behind it.
    after_first = np.concatenate(([False], (small & begins_block)[:-1]))
    keep = begins_block | ~(small | after_first)
    first = np.flatnonzero(keep)
    return starts[first], np.concatenate((ends[first[1:] - 1], ends[-1:]))


def _join_equal(starts: Ints, ends: Ints, ranks: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Join neighbours that the same ranks need bytes of."""
    if not len(starts):
        return starts, ends
    wanted = _wanted(ranks, starts, ends)
    differs = (wanted[1:] != wanted[:-1]).any(axis=1) | (starts[1:] != ends[:-1])
    first = np.flatnonzero(np.concatenate(([True], differs)))
    return starts[first], np.concatenate((ends[first[1:] - 1], ends[-1:]))


def _wanted(ranks: Sequence[Ints], starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
    """For each range and rank, whether the rank needs bytes of the range."""
    wanted = np.zeros((len(starts), len(ranks)), dtype=bool)
    for rank, spans in enumerate(ranks):
        if len(spans):
            place = np.searchsorted(spans[:, 1], starts, side="right")
            begin = spans[np.minimum(place, len(spans) - 1), 0]
            wanted[:, rank] = (place < len(spans)) & (begin < ends)
    return wanted


def _trim(starts: Ints, ends: Ints, union: Ints) -> tuple[Ints, Ints]:
    """Without the gaps at both ends of chunks; starts stay aligned."""
    if not len(starts):
        return starts, ends
    first = union[np.searchsorted(union[:, 1], starts, side="right"), 0]
    first -= first % ALIGNMENT_BYTES
    last = union[np.searchsorted(union[:, 0], ends, side="left") - 1, 1]
    return np.maximum(starts, first), np.minimum(ends, last)


def _plan(
    line: Line,
    starts: Ints,
    ends: Ints,
    wanted: npt.NDArray[np.bool_],
    needed_bytes: int,
    by_object: bool,
) -> NodePlan:
    objects, offsets = line.take(starts)
    sizes = ends - starts
    if by_object:
        owners = _owners_of_objects(objects, sizes, wanted)
    else:
        owners = _owners(_tuples(wanted), sizes.tolist(), wanted.shape[1])
    owner_of = np.array(owners, dtype=np.int64)
    wanted[np.arange(len(sizes)), owner_of] = True
    fetched = np.zeros(wanted.shape[1], dtype=np.int64)
    np.add.at(fetched, owner_of, sizes)
    columns = (objects, offsets, offsets + sizes)
    rows = zip(*(column.tolist() for column in columns), owners, _tuples(wanted), strict=True)
    return NodePlan(
        chunks=[NodeChunk(*row) for row in rows],
        fetched_bytes=int(sizes.sum()),
        needed_bytes=needed_bytes,
        shared_bytes=int(sizes[wanted.sum(axis=1) > 1].sum()),
        fetched_by_rank=tuple(fetched.tolist()),
        received_by_rank=tuple((sizes @ wanted - fetched).tolist()),
    )


def _tuples(wanted: npt.NDArray[np.bool_]) -> list[tuple[int, ...]]:
    """Each row as the numbers of its set columns."""
    known: dict[bytes, tuple[int, ...]] = {}
    found = []
    for number, row in enumerate(map(bytes, wanted)):
        who = known.get(row)
        if who is None:
            who = known[row] = tuple(np.flatnonzero(wanted[number]).tolist())
        found.append(who)
    return found


def _owners(consumers: Sequence[tuple[int, ...]], sizes: Sequence[int], ranks: int) -> list[int]:
    """For each chunk the consumer with the least bytes; those with the least choice come first."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for k in sorted(range(len(sizes)), key=lambda k: len(consumers[k])):
        owners[k] = owner = min(consumers[k], key=loads.__getitem__)  # the first of equals
        loads[owner] += sizes[k]
    return owners


def _owners_of_objects(objects: Ints, sizes: Ints, wanted: npt.NDArray[np.bool_]) -> list[int]:
    """The same for whole objects, the largest ones first."""
    indices, of = np.unique(objects, return_inverse=True)
    totals = np.bincount(of, weights=sizes, minlength=len(indices)).astype(np.int64)
    wanted_objects = np.zeros((len(indices), wanted.shape[1]), dtype=bool)
    np.logical_or.at(wanted_objects, of, wanted)
    order = np.argsort(-totals, kind="stable")
    consumers = _tuples(wanted_objects[order])
    owners = np.empty(len(indices), dtype=np.int64)
    owners[order] = _owners(consumers, totals[order].tolist(), wanted.shape[1])
    return list(owners[of].tolist())
