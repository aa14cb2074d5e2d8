"""What a load brings into the exchange with the other ranks of its host, and how it meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fastload_common.checkpoint.records import Checkpoint
from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.exchange.group import RankGroup
from fastload_common.exchange.meeting import Alone, meet
from fastload_common.exchange.node_exchange import NodeExchange
from fastload_common.exchange.terms import Fetch, Terms, digest_of
from fastload_common.load.report import LoadReport
from fastload_common.plan.planner import ALIGNMENT_BYTES
from fastload_common.ranges import ObjectId
from fastload_common.staging.arena import Arena

__all__ = ["join", "terms_of"]


def join(
    group: RankGroup | None,
    settings: Settings,
    clock: Clock,
    report: LoadReport,
    *,
    started_s: float,
) -> NodeExchange | None:
    """Meet the other ranks of this host; None: this rank reads alone, and the report says why.

    Every rank of the group must come here, also those whose settings forbid the exchange: the
    others wait for them.

    Args:
        started_s: the clock's reading when the load began; its deadline counts from it.
    """
    if group is None or group.size == 1:
        return None
    off = "FASTLOAD_EXCHANGE=off" if settings.exchange == "off" else ""
    met = meet(group, clock, why_not=off)
    if isinstance(met, Alone):
        report.node = {"ranks": met.ranks, "exchange": "off", "reason": met.reason}
        return None
    limit_s = settings.deadline_s
    report.node = {"ranks": len(met.lines) + 1, "exchange": "on", "reason": None}
    deadline_s = None if limit_s is None else started_s + limit_s
    try:
        return NodeExchange(met, clock, deadline_s=deadline_s, limit_s=limit_s)
    except BaseException:
        for _, line in met.lines:
            line.close()  # the others see that this rank has gone
        raise


def terms_of(
    checkpoints: Sequence[Checkpoint],
    settings: Settings,
    arena: Arena,
    fetch: Fetch,
    abort: Callable[[], None],
    gap_bytes: int,
) -> Terms:
    """This rank's part.

    Args:
        fetch: brings chunks into the arena.
        abort: ends that at once.
        gap_bytes: gaps up to this long are read over.
    """
    by_object = settings.verify != "off"
    return Terms(
        arena_fd=arena.fd,
        arena_bytes=arena.size_bytes,
        objects=_objects(checkpoints),
        chunk_bytes=arena.slot_bytes - arena.slot_bytes % ALIGNMENT_BYTES,
        gap_bytes=gap_bytes,
        by_object=by_object,
        headers=digest_of(_entries(checkpoints)) if by_object else b"",
        fetch=fetch,
        abort=abort,
    )


def _objects(checkpoints: Sequence[Checkpoint]) -> tuple[ObjectId, ...]:
    """All objects that hold tensors, in an order that is the same on all ranks."""
    entries = (entry for checkpoint in checkpoints for entry in checkpoint.entries.values())
    return tuple(sorted({entry.object_id for entry in entries}, key=lambda one: one.uri))


def _entries(checkpoints: Sequence[Checkpoint]) -> Iterable[object]:
    for checkpoint in checkpoints:
        for e in checkpoint.entries.values():
            yield e.name, e.dtype, e.shape, e.object_id.uri, e.byte_range.start, e.byte_range.end
