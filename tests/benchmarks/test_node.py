"""The benchmark of a node runs, checks its bytes and judges; its times are not judged here."""

from __future__ import annotations

import pytest

from benchmarks.compiled import find_compiler
from benchmarks.node import bars_of, summarize
from tests.benchmarks.small_run import small_run


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
def test_a_small_run_measures_both_ways() -> None:
    _, found = small_run("node", "--quick", "--scale=0.1", "--ranks=2")
    assert len(found["cases"]) == 2
    for case in found["cases"].values():
        assert "failed" not in case
        # Headers of 128 KiB for each rank, of a small model.
        assert 1 <= case["exchange"]["model_ratio"] < 1.05
        assert case["alone"]["model_ratio"] > 1.25
        assert case["exchange"]["needed_ratio"] == case["alone"]["needed_ratio"]


def test_ratios_are_those_within_a_round() -> None:
    rows = [
        {
            "network": "500 MB/s",
            "ranks": 2,
            "way": way,
            "round": number,
            "wall_s": wall_s * load,
            "cpu_s": load,
            "model_ratio": ratio,
            "needed_ratio": 1.0,
            "requests": 1,
        }
        for number, load in enumerate((1, 5, 2))
        for way, wall_s, ratio in (("exchange", 1.0, 1.002), ("alone", 2.0, 1.4))
    ]
    rows.append({"network": "500 MB/s", "ranks": 4, "way": "alone", "round": 0, "failed": "why"})
    cases = summarize(rows)
    assert cases["500 MB/s, TP=2"]["wall_s_ratio"] == 0.5
    assert cases["500 MB/s, TP=2"]["exchange"]["wall_s"] == 2
    bars = {bar.name: bar.passed for bar in bars_of(cases)}
    assert bars["wall / wall alone, 500 MB/s, TP=2"] is True
    assert bars["bytes / model, 500 MB/s, TP=2"] is True
    assert bars["bytes / model, 500 MB/s, TP=4"] is False
    assert bars["bytes / model, loopback, TP=2"] is None
