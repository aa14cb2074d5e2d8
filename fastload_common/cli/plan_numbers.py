"""From what each rank would read to the numbers of ``fastload plan``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fastload_common.plan.needs import Needs
from fastload_common.plan.node import NodeChunk, NodePlan, plan_node

if TYPE_CHECKING:
    from fastload_common.load.plan_job import RankTrace

__all__ = ["NodeNumbers", "RankNumbers", "Rows", "numbers_of"]

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """One rank. All sizes in bytes.

    Attributes:
        needed_bytes: what it copies into its parameters, and what it looks at.
        fetched_bytes, requests: what it asks the store for, for itself and for others.
        over_read_bytes: of what it fetches, what no rank needs.
        received_bytes: what others fetch and it reads from their memory.
        alone_fetched_bytes, alone_requests: what it would fetch if no other rank helped.
        eager: whether it reads whole tensors, one after the other, by itself.
        needs, fetches: for each object, rows ``[start, end)``: the exact ranges that it needs, and
            the chunks that it fetches.
    """

    rank: int
    needed_bytes: int
    fetched_bytes: int
    requests: int
    over_read_bytes: int
    received_bytes: int
    alone_fetched_bytes: int
    alone_requests: int
    eager: bool
    needs: tuple[Rows, ...]
    fetches: tuple[Rows, ...]


@dataclass(frozen=True, slots=True)
class NodeNumbers:
    """All ranks of a node. All sizes in bytes.

    Attributes:
        model_bytes: of all tensors.
        needed_bytes: what at least one rank needs. Where a rank needs so many ranges that its
            list has gaps in it, at most this much.
        shared_bytes: what is fetched once and used by more than one rank.
        seconds, alone_seconds: to fetch it at a given rate of the node, with and without exchange.
    """

    ranks: tuple[RankNumbers, ...]
    model_bytes: int
    needed_bytes: int
    fetched_bytes: int
    requests: int
    over_read_bytes: int
    shared_bytes: int
    alone_fetched_bytes: int
    alone_requests: int
    chunk_bytes: int
    merge_gap_bytes: int
    gbps: float

    @property
    def model_ratio(self) -> float:
        """Fetched bytes / bytes of the model."""
        return self.fetched_bytes / max(self.model_bytes, 1)

    @property
    def alone_ratio(self) -> float:
        return self.alone_fetched_bytes / max(self.model_bytes, 1)

    @property
    def seconds(self) -> float:
        return self.fetched_bytes * 8 / (self.gbps * 1e9)

    @property
    def alone_seconds(self) -> float:
        return self.alone_fetched_bytes * 8 / (self.gbps * 1e9)


def numbers_of(traces: Sequence[RankTrace], *, gbps: float) -> NodeNumbers:
    """Plan the node, and count.

    Args:
        traces: of all ranks, in order.
        gbps: of the node's link, in 10^9 bits per second.
    """
    objects = len(traces[0].objects)
    # As the ranks themselves agree on them.
    chunk_bytes = min(trace.chunk_bytes for trace in traces)
    merge_gap_bytes = min(trace.merge_gap_bytes for trace in traces)
    nothing = Needs.of([], traces[0].objects, gap_bytes=0)
    node = plan_node(
        [Needs.decode(t.needs, objects) if t.shared else nothing for t in traces],
        chunk_bytes=chunk_bytes,
        gap_bytes=merge_gap_bytes,
    )
    listed = [Needs.decode(trace.exact, objects) for trace in traces]
    union = [_merged([needs.spans[k] for needs in listed]) for k in range(objects)]
    listed_bytes = sum(map(_size_bytes, union))
    needed_bytes = listed_bytes
    if any(sum(map(_size_bytes, needs.spans)) > needs.needed_bytes for needs in listed):
        # More ranges than can be listed: gaps between them are in the lists, not in the sums.
        needed_bytes = min(listed_bytes, sum(needs.needed_bytes for needs in listed))
    ranks = [
        _rank(trace, node, needs.spans, union, needed_bytes / max(listed_bytes, 1))
        for trace, needs in zip(traces, listed, strict=True)
    ]
    return NodeNumbers(
        ranks=tuple(ranks),
        model_bytes=traces[0].model_bytes,
        needed_bytes=needed_bytes,
        fetched_bytes=sum(rank.fetched_bytes for rank in ranks),
        requests=sum(rank.requests for rank in ranks),
        over_read_bytes=sum(rank.over_read_bytes for rank in ranks),
        shared_bytes=node.shared_bytes,
        alone_fetched_bytes=sum(rank.alone_fetched_bytes for rank in ranks),
        alone_requests=sum(rank.alone_requests for rank in ranks),
        chunk_bytes=chunk_bytes,
        merge_gap_bytes=merge_gap_bytes,
        gbps=gbps,
    )


def _rank(
    trace: RankTrace,
    node: NodePlan,
    needs: tuple[Rows, ...],
    union: Sequence[Rows],
    dense: float,
) -> RankNumbers:
    """One rank's part.

    Args:
        needs: its exact needs.
        union: those of all ranks.
        dense: how much of the union is needed; the rest are gaps of its list. 1 if it is exact.
    """
    own = [chunk for chunk in node.chunks if chunk.owner == trace.rank]
    if trace.shared:
        fetches = _rows(own, len(union))
        fetched = node.fetched_by_rank[trace.rank] + trace.early_fetched_bytes
        common = sum(map(_common_bytes, fetches, union))
        used = trace.early_needed_bytes + (common if dense == 1 else round(common * dense))
        requests, received = len(own) + trace.early_requests, node.received_by_rank[trace.rank]
    else:
        fetches = needs
        fetched, used = trace.alone_fetched_bytes, trace.needed_bytes
        requests, received = trace.alone_requests, 0
    return RankNumbers(
        rank=trace.rank,
        needed_bytes=trace.needed_bytes,
        fetched_bytes=fetched,
        requests=requests,
        over_read_bytes=max(fetched - used, 0),
        received_bytes=received,
        alone_fetched_bytes=trace.alone_fetched_bytes,
        alone_requests=trace.alone_requests,
        eager=not trace.shared,
        needs=needs,
        fetches=fetches,
    )


def _size_bytes(rows: Rows) -> int:
    return int((rows[:, 1] - rows[:, 0]).sum())


def _rows(chunks: Sequence[NodeChunk], objects: int) -> tuple[Rows, ...]:
    """The chunks' ranges for each object."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(objects)]
    for chunk in chunks:
        found[chunk.object_index].append((chunk.start, chunk.end))
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 2) for rows in found)


def _merged(parts: Sequence[Rows]) -> Rows:
    """The union of some sets of ranges, ascending and disjoint."""
    rows = np.concatenate(parts)
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    first = np.flatnonzero(np.concatenate(([True], rows[1:, 0] > reach[:-1])))
    return np.stack((rows[first, 0], np.concatenate((reach[first[1:] - 1], reach[-1:]))), axis=1)


def _common_bytes(chunks: Rows, union: Rows) -> int:
    """How many bytes of the chunks lie in the union."""
    if not len(chunks) or not len(union):
        return 0
    before = np.concatenate(([0], np.cumsum(union[:, 1] - union[:, 0])))

    def covered(positions: Rows) -> Rows:
        """Bytes of the union in front of each position."""
        place = np.searchsorted(union[:, 0], positions, side="right") - 1
        inside = np.minimum(positions, union[place, 1]) - union[place, 0]
        return np.where(place < 0, 0, before[place] + inside)

    return int((covered(chunks[:, 1]) - covered(chunks[:, 0])).sum())
