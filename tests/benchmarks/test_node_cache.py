"""The benchmark of the node cache runs, counts its bytes and judges; its times are not judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled import find_compiler
from benchmarks.node_cache import CASES, bars_of, summarize
from fastload_common.units import MIB
from tests.benchmarks.small_run import small_run


def row(case: str, number: int, wall_s: float, ratio: float = 1.0) -> dict[str, Any]:
    figures = {"cpu_s": 1.0, "model_ratio": ratio, "requests": 1, "node_cache": [{}]}
    return {"case": case, "round": number, "wall_s": wall_s, **figures}


def rows_of(first_s: float, second: float = 0.0) -> list[dict[str, Any]]:
    rows = []
    for number, load in enumerate((1, 5, 2)):
        rows += [row("off", number, load), row("first", number, load * first_s)]
        rows += [row("second", number, load, second), row("half", number, load, 0.5)]
    return rows


@pytest.mark.parametrize(
    ("first_s", "second", "passed"),
    [(1.03, 0.0, [True, True, True]), (1.04, 0.001, [False, False, True])],
)
def test_the_first_load_is_compared_within_a_round(
    first_s: float, second: float, passed: list[bool]
) -> None:
    found = summarize(rows_of(first_s, second))
    assert found["wall_ratio"] == first_s
    assert [bar.passed for bar in bars_of(found)] == passed


def test_a_load_that_failed_is_above_all_bars() -> None:
    rows = [*rows_of(1.0), {"case": "half", "round": 3, "failed": "why"}]
    assert [bar.passed for bar in bars_of(summarize(rows))] == [False, False, False]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
def test_a_small_run_reads_the_second_time_from_the_disk(tmp_path: Path) -> None:
    options = ["--quick", "--scale=0.125", f"--directory={tmp_path}"]
    _, found = small_run("node_cache", *options)
    assert found["model_bytes"] == 64 * MIB
    assert "failed" not in found["cases"]
    assert {case: round(found["cases"][case]["model_ratio"], 1) for case in CASES} == {
        "off": 1.0,
        "first": 1.0,
        "second": 0.0,
        "half": 0.5,
    }
    assert not list(tmp_path.iterdir())
