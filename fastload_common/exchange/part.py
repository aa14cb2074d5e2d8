"""What ranks told, as needs of the same objects; one rank's part of the plan that follows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastload_common.errors import ChecksumMismatchError, FastloadError, ObjectChangedError
from fastload_common.exchange.terms import Terms, digest_of
from fastload_common.exchange.words import Told
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId

if TYPE_CHECKING:  # numpy comes with them
    from fastload_common.plan.needs import Needs
    from fastload_common.plan.node import NodePlan

__all__ = ["MOST_GAP_BYTES", "Part", "divide", "needs_told", "part_of", "sharers", "told_of"]

_log = logging.getLogger(__name__)

# Beyond what any model or machine has.
MOST_GAP_BYTES = 1 << 40
_MOST_CHUNK_BYTES = 1 << 40


@dataclass(slots=True)
class Part:
    """One rank's part. Chunks go by their number in the plan.

    Attributes:
        chunks: that this rank needs, whoever fetches them.
        owners: of these, the rank that fetches each.
        takers: of those that this rank fetches, the other ranks that need them.
        unneeded: objects of which nobody needs anything, by their place in the table.
        facts: numbers for the report.
    """

    chunks: dict[int, Chunk] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    takers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unneeded: tuple[int, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)


def part_of(plan: NodePlan, objects: Sequence[ObjectId], ranks: Sequence[int], rank: int) -> Part:
    """One rank's part of a plan whose owners and consumers are places in ``ranks``."""
    mine = ranks.index(rank)
    part = Part(
        facts={
            "node_fetched_bytes": plan.fetched_bytes,
            "node_over_read_bytes": plan.fetched_bytes - plan.needed_bytes,
            "node_shared_bytes": plan.shared_bytes,
        }
    )
    needed = set()
    for number, row in enumerate(plan.chunks):
        needed.add(row.object_index)
        if mine not in row.consumers:
            continue
        byte_range = ByteRange(row.start, row.end)
        part.chunks[number] = Chunk(objects[row.object_index], byte_range, byte_range.size_bytes)
        part.owners[number] = ranks[row.owner]
        if row.owner == mine:
            part.takers[number] = tuple(ranks[k] for k in row.consumers if k != mine)
    part.unneeded = tuple(k for k in range(len(objects)) if k not in needed)
    return part


def told_of(terms: Terms, needs: bytes) -> Told:
    """What a rank of these terms tells, with its encoded needs."""
    return Told(
        chunk_bytes=terms.chunk_bytes,
        gap_bytes=min(terms.gap_bytes, MOST_GAP_BYTES),
        by_object=terms.by_object,
        objects=digest_of(terms.objects),
        headers=terms.headers or Told.NOTHING,
        uris=digest_of(one.uri for one in terms.objects),
        needs=needs,
    )


def sharers(all_told: Mapping[int, Told], own_rank: int) -> dict[int, Told]:
    """Those who fetch together with this rank, and this rank itself; ascending.

    All that do not read alone; only this one, where some load from other places than others.
    """
    sharing = {rank: all_told[rank] for rank in sorted(all_told) if all_told[rank].needs}
    if len({row.uris for row in sharing.values()}) <= 1:
        return sharing
    if own_rank == min(sharing):
        other = next(r for r in sharing if sharing[r].uris != sharing[own_rank].uris)
        _log.warning(
            "the %d ranks of this host read alone, what several of them need more than once: "
            "rank %d loads from other places than rank %d",
            len(sharing),
            other,
            own_rank,
        )
    return {own_rank: all_told[own_rank]}


def divide(needs: Sequence[Needs], sharing: Sequence[Told], *, by_object: bool) -> NodePlan:
    """The plan for the ranks of a host, on terms that suit all that share.

    Raises:
        FastloadError: it cannot be made.
    """
    from fastload_common.plan.node import plan_node

    try:
        return plan_node(
            needs,
            chunk_bytes=min(row.chunk_bytes for row in sharing),
            gap_bytes=min(row.gap_bytes for row in sharing),
            by_object=by_object,
        )
    except ValueError as error:
        # Not a ValueError: that would be taken for the model's code, and read eagerly.
        raise FastloadError(
            f"what the ranks of this host need could not be divided among them: {error}",
            hint="this is a fault of fastload: please report it, and set FASTLOAD_EXCHANGE=off",
        ) from error


def needs_told(
    rank: int, all_told: Mapping[int, Told], own_rank: int, objects: Sequence[ObjectId]
) -> Needs:
    """What a rank needs, if it speaks of the same objects as this one, of the same URIs.

    Raises:
        ObjectChangedError: it found different ones: the model was changed.
        ChecksumMismatchError: it read different headers.
        ValueError: what it told makes no sense.
    """
    from fastload_common.plan.needs import Needs

    told, own = all_told[rank], all_told[own_rank]
    if told.objects != own.objects:
        raise ObjectChangedError(
            f"rank {rank} found other objects than rank {own_rank}, which loads the same model: it "
            "was changed while the ranks were opening it",
            hint="load again when nobody writes there",
            first=objects[0].uri if objects else None,
        )
    if Told.NOTHING not in (told.headers, own.headers) and told.headers != own.headers:
        raise ChecksumMismatchError(
            f"rank {rank} read other headers than rank {own_rank} from the same objects",
            hint="load again; one of them was damaged on its way",
            first=objects[0].uri if objects else None,
        )
    if not told.needs:
        return Needs.of([], objects, gap_bytes=0)
    _check_terms(told)
    needs = Needs.decode(told.needs, len(objects))
    for spans, one in zip(needs.spans, objects, strict=True):
        if len(spans) and int(spans[-1, 1]) > one.size_bytes:
            raise ValueError(f"bytes up to {spans[-1, 1]} of {one.uri}, which has {one.size_bytes}")
    return needs


def _check_terms(told: Told) -> None:
    from fastload_common.plan.cutting import ALIGNMENT_BYTES

    size_bytes = told.chunk_bytes
    if not 0 < size_bytes <= _MOST_CHUNK_BYTES or size_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"chunks of {size_bytes} bytes")
    if told.gap_bytes > MOST_GAP_BYTES:
        raise ValueError(f"gaps of {told.gap_bytes} bytes")
