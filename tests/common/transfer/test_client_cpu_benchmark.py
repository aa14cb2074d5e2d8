"""The CPU benchmark runs, checks its bytes and judges; its numbers are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.client_cpu import Sample, summarize
from benchmarks.compiled import find_compiler

CLIENTS = {"floor", "fastload", "boto3"}


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
def test_a_small_run_measures_every_client() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.client_cpu", "--json", "--rounds=1", "--gib=0.25"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["pass"] else 1)
    assert found["clients"].keys() == CLIENTS
    assert {sample["client"] for sample in found["samples"]} == CLIENTS
    assert all(row["cpu_s_per_gib"] > 0 for row in found["clients"].values())


@pytest.mark.parametrize(("ours", "passes"), [(0.45, True), (0.60, False)])
def test_the_verdict_is_on_ratios_within_a_round(ours: float, passes: bool) -> None:
    samples = [Sample("floor", number, 0.3 * load, 1.0) for number, load in enumerate((1, 2, 4))]
    for number, load in enumerate((1, 2, 4)):
        samples.append(Sample("fastload", number, ours * load, 1.0))
        samples.append(Sample("boto3", number, 0.9 * load, 1.0))
    found = summarize(samples)
    assert found["pass"] is passes
    assert found["clients"]["fastload"]["ratio"] == pytest.approx(ours / 0.3)
    assert found["clients"]["boto3"]["ratio_max"] == pytest.approx(3.0)
