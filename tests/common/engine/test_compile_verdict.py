"""From counters to a verdict: what torch says, what it comes to, and in which words."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest

from fastload_common.compile_cache.lifecycle import Outcome
from fastload_common.engine.compile_counters import (
    Counted,
    count_torch,
    graphs_of,
    sum_counted,
    torch_compile_s,
)
from fastload_common.engine.compile_verdict import judge

MODULE = "torch._dynamo.utils"


def test_a_process_without_torch_has_compiled_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert count_torch() == {}
    assert torch_compile_s() == 0.0


def test_torchs_counters_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: dict[str, Counter[str]] = defaultdict(Counter)
    counters["inductor"].update(fxgraph_cache_hit=3, pattern_matcher_count=9)
    counters["aot_autograd"].update(autograd_cache_miss=4)
    times = {"inner": 1_500_000_000, "outer": 4_000_000_000}
    module = SimpleNamespace(counters=counters, cumulative_time_spent_ns=times)
    monkeypatch.setitem(sys.modules, MODULE, module)
    assert count_torch() == {"fxgraph_cache_hit": 3, "autograd_cache_miss": 4}
    assert torch_compile_s() == 4.0


@pytest.mark.torch
def test_the_counters_are_those_of_the_real_torch() -> None:
    pytest.importorskip("torch")
    import torch._dynamo.utils as real

    assert real.counters is sys.modules[MODULE].counters
    assert isinstance(count_torch(), dict)
    assert torch_compile_s() >= 0


@pytest.mark.parametrize(
    ("details", "compiled", "loaded"),
    [
        ({}, 0, 0),
        # Without AOTAutograd's cache.
        ({"fxgraph_cache_miss": 2}, 2, 0),
        ({"fxgraph_cache_hit": 2}, 0, 2),
        ({"fxgraph_cache_hit": 1, "fxgraph_cache_miss": 2, "fxgraph_cache_bypass": 1}, 3, 1),
        # Both: what the first misses the second may have.
        ({"autograd_cache_miss": 2, "fxgraph_cache_miss": 2}, 2, 0),
        ({"autograd_cache_miss": 2, "fxgraph_cache_hit": 2}, 0, 2),
        ({"autograd_cache_hit": 2}, 0, 2),
        ({"autograd_cache_hit": 2, "fxgraph_cache_hit": 2}, 0, 2),
        ({"autograd_cache_bypass": 2, "fxgraph_cache_hit": 1, "fxgraph_cache_miss": 1}, 1, 1),
        # Entries that hold the code as well.
        ({"autograd_cache_miss": 3}, 3, 0),
        ({"autograd_cache_hit": 1, "autograd_cache_miss": 3}, 3, 1),
    ],
)
def test_graphs_compiled_and_found(details: dict[str, int], compiled: int, loaded: int) -> None:
    assert graphs_of(details) == (compiled, loaded)


def test_counts_of_ranks_are_added_and_the_slowest_is_timed() -> None:
    total = sum_counted([Counted(1, 2, 3.0, {"a": 1}), Counted(4, 0, 5.0, {"a": 2, "b": 1})])
    assert total == Counted(5, 2, 5.0, {"a": 3, "b": 1})
    assert sum_counted([]) == Counted()


@pytest.mark.parametrize(
    ("status", "compiled", "loaded", "measured"),
    [
        ("hit", 0, 3, "hit"),
        ("hit", 2, 1, "partial"),
        ("hit", 2, 0, "unused"),
        ("hit", 0, 0, "idle"),
        ("miss", 2, 0, "miss"),
        ("miss", 2, 1, "miss"),
        ("miss", 0, 3, "warm"),
        ("failed", 2, 0, "miss"),
        ("failed", 0, 0, "idle"),
    ],
)
def test_every_case_has_its_word(status: str, compiled: int, loaded: int, measured: str) -> None:
    verdict = judge(Outcome(status), Counted(compiled, loaded, 1.25), 1, 4.0)
    assert verdict.measured == measured
    assert verdict.saved_s == (2.75 if status == "hit" else None)
    assert bool(verdict.why) is (measured in ("idle", "unused"))


def test_what_the_adapter_knows_is_said_where_something_was_not_used() -> None:
    why = "it cannot load what it saves"
    unused = judge(Outcome("hit"), Counted(1, 0), 1, None, why)
    assert (unused.why, unused.saved_s) == (why, None)
    assert judge(Outcome("hit"), Counted(1, 1), 1, None, why).why == why
    assert judge(Outcome("hit"), Counted(0, 1), 1, None, why).why == ""
    assert str(unused).endswith(f"0.0 s in it; {why}")
