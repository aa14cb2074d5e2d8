"""The comparison runs, checks its bytes and judges; its numbers are not judged here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.compiled import find_compiler
from benchmarks.peers import Sample, bars_of, summarize
from tests.benchmarks.small_run import small_run

CLIENTS = {"C floor", "fastload", "fastload defaults", "boto3"}


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
def test_a_small_run_measures_every_client() -> None:
    options = ["--rounds=1", "--scale=0.03", "--only", ",".join(CLIENTS)]
    status, found = small_run("peers", *options, timeout_s=120)
    assert status == (0 if found["pass"] else 1)
    assert found["failed"] == {}
    for clients in found["clients"].values():
        assert clients.keys() == CLIENTS
        assert all(row["cpu_s_per_gib"] > 0 for row in clients.values())
        assert clients["fastload"]["bytes"] == clients["fastload defaults"]["bytes"]
        assert clients["boto3"]["bytes"] < clients["fastload"]["bytes"]


@pytest.mark.parametrize(("ours", "passes"), [(0.36, True), (0.45, False)])
def test_the_verdict_is_on_ratios_within_a_round(ours: float, passes: bool) -> None:
    samples = [
        Sample("http", client, number, cpu_s * load, 1.0)
        for number, load in enumerate((1, 2, 4))
        for client, cpu_s in (("C floor", 0.3), ("fastload", ours), ("awscrt", 1.4))
    ]
    rows = summarize(samples)
    bars = {(bar.limit, bar.value): bar.passed for bar in bars_of(rows)}
    assert rows["http"]["C floor"]["fastload_cpu_ratio"] == pytest.approx(ours / 0.3)
    assert bars[1.3, rows["http"]["C floor"]["fastload_cpu_ratio"]] is passes
    # What was not measured is neither passed nor failed.
    assert bars[1.5, None] is None


def test_a_client_ends_with_the_benchmark() -> None:
    """However that ends: here it is killed."""
    code = (
        "import subprocess, sys\n"
        "client = 'import benchmarks.clients.run as run, time; run.end_with_parent(); '\n"
        "client += 'print(0, flush=True); time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', client], start_new_session=True)\n"
        "input()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"0\n"
    parent.kill()
    # The pipe closes when the last process that has it is gone.
    assert parent.stdout.read() == b""
    parent.communicate()
