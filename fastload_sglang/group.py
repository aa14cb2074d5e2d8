"""The processes that load a model together with this one, and where this one stands among them."""

from __future__ import annotations

from typing import Any

from fastload_common.engine.cpu_group import CpuGroup
from fastload_common.load.session import RankPlace
from fastload_sglang import compat

__all__ = ["loading_group", "rank_place"]


def loading_group(load_config: Any) -> CpuGroup | None:
    """Those that load this model now; None where nobody else surely does.

    SGLang says it itself (for its own collective loader): all ranks of the world when it starts,
    the ranks of one pipeline stage where only that stage loads, such as a draft. Data-parallel
    replicas are worlds of their own, unless they share attention. A world to which ranks may
    come later does not load at one time.
    """
    parallel = compat.PARALLEL.get()()
    group = load_config.load_group
    if group is compat.DEFAULT_GROUP.get():
        group = _world(parallel)
    if group is None or group.world_size < 2 or _may_grow(parallel):
        return None
    return CpuGroup(group)


def rank_place() -> RankPlace:
    """This process among those of its node that load a model."""
    parallel = compat.PARALLEL.get()()
    world = _world(parallel)
    rank, ranks = (0, 1) if world is None else (world.rank_in_group, world.world_size)
    nodes = max(1, parallel.nnodes)
    # Ranks are dealt to nodes in order. Replicas with a world of their own are on this node too.
    ranks_here = max(1, ranks // nodes)
    replicas = max(1, _replicas(parallel) // nodes)
    replica = _read(parallel, "dp_rank") or 0
    return RankPlace(
        engine=compat.ENGINE.package,
        engine_version=compat.ENGINE.version(),
        rank=rank,
        world_size=ranks,
        local_rank=(replica % replicas) * ranks_here + rank % ranks_here,
        local_world_size=replicas * ranks_here,
    )


def _world(parallel: Any) -> Any:
    """The world group; None where it has not been made."""
    return _read(parallel, "world_group")


def _replicas(parallel: Any) -> int:
    return int(_read(parallel, "dp_size") or 1)


def _may_grow(parallel: Any) -> bool:
    most, now = _read(parallel, "max_world_size"), _read(parallel, "launch_world_size")
    return most is not None and most != now


def _read(parallel: Any, name: str) -> Any:
    """What nothing has written in this process is None."""
    try:
        return getattr(parallel, name)
    except (AttributeError, RuntimeError, ValueError):
        return None
