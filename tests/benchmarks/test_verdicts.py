"""How measurements become figures and verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import busy, tail
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish


def busy_row(client: str, number: int, computing: bool, speed: float) -> dict[str, Any]:
    return {
        "scheme": "https",
        "case": "limited",
        "client": client,
        "round": number,
        "busy": computing,
        "alone": not computing,
        "gib_per_s": speed,
    }


def test_what_a_busy_thread_leaves_is_compared_within_a_round() -> None:
    rows = [
        busy_row("fastload", number, computing, load * (0.9 if computing else 1.0))
        for number, load in enumerate((1.0, 0.2, 0.5))
        for computing in (True, False)
    ]
    found = busy.ratios(rows)["fastload, https, limited"]
    assert found["kept"] == found["kept_min"] == found["kept_max"] == 0.9
    assert found["gib_per_s"] == 0.5


def test_beside_other_computation_is_judged_and_alone_is_shown() -> None:
    rows = [
        busy_row("fastload", 0, True, 0.5),
        busy_row("fastload", 0, False, 1.0),
        busy_row("fastload", 0, False, 0.625) | {"alone": False},
    ]
    found = busy.ratios(rows)["fastload, https, limited"]
    assert (found["kept"], found["literal"]) == (0.8, 0.5)
    assert (found["gib_per_s"], found["gib_per_s_alone"]) == (0.625, 1.0)


def tail_row(faults: bool, seed: int = 2, **figures: Any) -> dict[str, Any]:
    server = {"requests": 500, "slow": 50 * faults, "stalled": 5 * faults}
    row = {"client": "fastload", "seed": seed, "faults": faults, "server": server}
    return row | {"slow_ratio": 3.0 if faults else None} | figures


def verdicts(*rows: dict[str, Any]) -> list[bool | None]:
    return [bar.passed for bar in tail.bars_of(tail.summarize(list(rows))["fastload"])]


def test_tail_time_and_bytes_are_held_against_the_run_without_faults() -> None:
    clean = tail_row(False, span_s=10.0, extra_bytes_share=0.0)
    good = tail_row(True, span_s=10.9, extra_bytes_share=0.049)
    slow = tail_row(True, span_s=11.5, extra_bytes_share=0.06)
    assert verdicts(clean, good) == [True, True]
    assert verdicts(clean, slow) == [False, False]


def test_a_load_that_did_not_end_has_failed() -> None:
    clean = tail_row(False, span_s=10.0, extra_bytes_share=0.0)
    hung = tail_row(True, extra_bytes_share=0.0, failed="did not end in 40 s")
    assert verdicts(clean, hung) == [False, False]


def test_a_run_without_faults_proves_nothing() -> None:
    clean = tail_row(False, span_s=10.0, extra_bytes_share=0.0)
    lucky = tail_row(True, span_s=10.0, extra_bytes_share=0.0)
    lucky["server"]["stalled"] = 0
    assert verdicts(clean, lucky) == [None, None]


@pytest.mark.parametrize(
    ("ratio", "measured"), [(2.4, False), (2.5, True), (3.5, True), (3.6, False), (None, False)]
)
def test_slow_requests_that_are_not_three_times_slower_prove_nothing(
    ratio: float | None, measured: bool
) -> None:
    clean = tail_row(False, span_s=10.0, extra_bytes_share=0.0)
    good = tail_row(True, span_s=10.0, extra_bytes_share=0.0, slow_ratio=ratio)
    assert verdicts(clean, good) == ([True, True] if measured else [None, None])


def test_the_median_of_the_seeds_is_judged_and_the_worst_is_named() -> None:
    rows = []
    for seed, span_s in ((2, 10.5), (9, 13.0), (11, 10.0)):
        rows.append(tail_row(False, seed, span_s=10.0, extra_bytes_share=0.0))
        rows.append(tail_row(True, seed, span_s=span_s, extra_bytes_share=0.01))
    found = tail.summarize(rows)["fastload"]
    assert (found["wall_ratio"], found["wall_ratio_max"], found["worst_seed"]) == (1.05, 1.3, 9)
    assert verdicts(*rows) == [True, True]


@pytest.mark.parametrize(("value", "status"), [(1.2, 0), (1.4, 1)])
def test_results_are_written_and_the_status_says_whether_bars_were_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, status: int
) -> None:
    def panels(found: dict[str, Any]) -> list[Panel]:
        return [Panel("title", "unit", {"series": {"row": found["value"]}})]

    bars = [Bar("ours", value, 1.3), Bar("not here", None, 1.0)]
    directory = tmp_path / "results"
    found = {"value": value}
    assert finish("one", found, bars, panels, as_json=False, directory=directory) == status
    written = json.loads((directory / "one.json").read_text(encoding="utf-8"))
    assert [bar["pass"] for bar in written["bars"]] == [status == 0, None]
    assert written["machine"]["cpus"] >= 1
    assert "not measured: not here" in capsys.readouterr().out
