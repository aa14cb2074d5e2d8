"""What Inductor and AOTAutograd say they have compiled, and what they have found compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Counted",
    "count_torch",
    "counted_by_torch",
    "graphs_of",
    "sum_counted",
    "torch_compile_s",
]


@dataclass(frozen=True, slots=True)
class Counted:
    """One rank's own counters since its process began.

    Attributes:
        compiled: artefacts that a compiler made here.
        loaded: artefacts that were found and used.
        compile_s: seconds in compilation, as the engine counts them; 0 where it does not.
        details: the counters by their own names.
    """

    compiled: int = 0
    loaded: int = 0
    compile_s: float = 0.0
    details: dict[str, int] = field(default_factory=dict)


_KINDS = {
    "fxgraph_cache_hit": ("inductor", "fxgraph_cache_hit"),
    "fxgraph_cache_miss": ("inductor", "fxgraph_cache_miss"),
    "fxgraph_cache_bypass": ("inductor", "fxgraph_cache_bypass"),
    "autograd_cache_hit": ("aot_autograd", "autograd_cache_hit"),
    "autograd_cache_miss": ("aot_autograd", "autograd_cache_miss"),
    "autograd_cache_bypass": ("aot_autograd", "autograd_cache_bypass"),
}


def count_torch() -> dict[str, int]:
    """torch's counters of its compile caches in this process; those that are 0 are left out.

    Those of AOTAutograd's cache and of the cache of FX graphs behind it; see `graphs_of`.
    """
    module: Any = sys.modules.get("torch._dynamo.utils")
    if module is None:  # then nothing was compiled
        return {}
    counters = module.counters
    found = {name: int(counters[group][kind]) for name, (group, kind) in _KINDS.items()}
    return {name: count for name, count in found.items() if count}


def torch_compile_s() -> float:
    """Seconds that torch has spent in compilation in this process: tracing and what follows."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    # Timers are nested, so the largest is that of the outermost.
    return float(max(getattr(module, "cumulative_time_spent_ns", {}).values(), default=0)) / 1e9


def graphs_of(details: Mapping[str, int]) -> tuple[int, int]:
    """From torch's counters: how many graphs were compiled, and how many were found.

    AOTAutograd's cache stands before that of FX graphs. What it misses may be found there; where
    its entries hold the code as well, the other one is not asked at all.
    """

    def of(prefix: str, *kinds: str) -> int:
        return sum(details.get(f"{prefix}_cache_{kind}", 0) for kind in kinds)

    found = of("fxgraph", "hit")
    missed = of("autograd", "miss", "bypass") - found
    compiled = max(of("fxgraph", "miss", "bypass"), missed, 0)
    return compiled, max(found, of("autograd", "hit"))


def counted_by_torch() -> Counted:
    """This process's counters, for engines whose other compilers have none."""
    details = count_torch()
    compiled, loaded = graphs_of(details)
    return Counted(compiled, loaded, round(torch_compile_s(), 3), details)


def sum_counted(ranks: Iterable[Counted]) -> Counted:
    """All ranks together: counts are added, of seconds the longest is taken."""
    ranks = list(ranks)
    return Counted(
        compiled=sum(rank.compiled for rank in ranks),
        loaded=sum(rank.loaded for rank in ranks),
        compile_s=max((rank.compile_s for rank in ranks), default=0.0),
        details=_added(rank.details for rank in ranks),
    )


def _added(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for table in tables:
        for name, count in table.items():
            total[name] = total.get(name, 0) + count
    return total
