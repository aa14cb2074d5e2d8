"""`Executor`: restore compiled artefacts beside the weights, publish them after warm-up.

The executor is made once on each node, in the one process that starts its workers, after plugins
are loaded there; when its making ends, the weights are there and nothing is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from fastload_common.engine.compile_counters import (
    Counted,
    count_torch,
    graphs_of,
    torch_compile_s,
)
from fastload_common.engine.compile_start import CompileStart
from fastload_common.engine.patch import Patch
from fastload_vllm import compat
from fastload_vllm.caches import ROOTS
from fastload_vllm.compile_factors import factors_of

__all__ = ["PATCHES", "count"]

logger = logging.getLogger(__name__)

_START = "_fastload_compile_start"
_SECONDS = "seconds"
_LOADED = ("num_compiled_artifacts_loaded", "num_aot_artifacts_loaded")


def _make(original: Callable[..., Any], self: Any, vllm_config: Any, *args: Any, **kw: Any) -> Any:
    start = CompileStart.begin(compat.ENGINE.package, partial(factors_of, vllm_config), ROOTS)
    try:
        return original(self, vllm_config, *args, **kw)
    finally:
        if start is not None:
            start.wait()
            setattr(self, _START, start)


def _warm_up(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    start: CompileStart | None = getattr(self, _START, None)
    if start is not None:
        delattr(self, _START)
        try:
            ranks = self.collective_rpc(count)
        except Exception as error:  # noqa: BLE001 - a cache never ends a server
            logger.warning("fastload: compile cache: no counters: %s", type(error).__name__)
            return result
        config = self.vllm_config.compilation_config
        seconds = float(config.compilation_time) + float(config.encoder_compilation_time)
        start.complete([_counted(rank, seconds) for rank in ranks], _why(ranks, start))
    return result


def count(worker: Any) -> dict[str, float]:
    """The counters of one rank, and its seconds in compilation; called in its process."""
    counter = compat.COUNTER.get()
    own = {name: int(getattr(counter, name, 0)) for name in compat.COUNTERS}
    return {
        **{name: value for name, value in own.items() if value},
        **count_torch(),
        _SECONDS: torch_compile_s(),
    }


def _counted(rank: dict[str, float], engine_s: float) -> Counted:
    details = {name: int(value) for name, value in rank.items() if name != _SECONDS}
    graphs, found = graphs_of(details)
    handed = details.get("num_inductor_compiles", 0)
    loaded = sum(details.get(name, 0) for name in _LOADED)
    return Counted(
        # The engine's adapter counts what it hands to Inductor, which may find it in its cache.
        compiled=max(graphs, handed - found),
        loaded=found + loaded,
        compile_s=max(engine_s, rank[_SECONDS]),
        details=details,
    )


def _why(ranks: list[dict[str, float]], start: CompileStart) -> str:
    compiled = sum(rank.get("num_aot_compiles", 0) for rank in ranks)
    loaded = sum(rank.get("num_aot_artifacts_loaded", 0) for rank in ranks)
    if start.outcome.status == "hit" and compiled and not loaded:
        return (
            "this engine saves what it compiles ahead of time and cannot load it again (see its "
            "warning): it traces anew, and without VLLM_USE_AOT_COMPILE=0 it may compile anew"
        )
    return ""


PATCHES = (
    Patch(
        name="compile-cache-restore",
        target=compat.MAKE_EXECUTOR,
        reason="Compiled artefacts must be in place before a worker looks for them, and the "
        "variables that name their directories must be set before a worker is started.",
        ends="The engine asks a plugin for compiled artefacts.",
        wrapper=_make,
    ),
    Patch(
        name="compile-cache-publish",
        target=compat.WARM_UP,
        reason="When this returns, every rank has compiled and captured.",
        ends="The engine tells a plugin when it has compiled.",
        wrapper=_warm_up,
    ),
)
