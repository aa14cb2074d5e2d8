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


def tail_row(faults: bool, **figures: Any) -> dict[str, Any]:
    server = {"requests": 500, "slow": 50 * faults, "stalled": 5 * faults}
    return {"client": "fastload", "seed": 2, "faults": faults, "server": server, **figures}


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
