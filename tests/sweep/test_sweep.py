"""A part of the sweep in every test run: one model for each way of putting one together."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.sweep.cases import LAYOUTS, SUBSET
from tests.sweep.ranks import ROOT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MOST_PER_OWN = 1.02
"""Bytes that a rank may need for each byte of its parameters."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("sweep")
    done = subprocess.run(
        [sys.executable, "-m", "tests.sweep.run_sweep", "--subset", "--directory", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1400,
    )
    print(done.stdout[-20_000:])
    assert (directory / "results.jsonl").exists(), done.stderr[-4000:]
    lines = (directory / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["case"], row["layout"]): row for row in rows}


def test_t09_every_architecture_loads_the_same_tensors(
    results: dict[tuple[str, str], dict[str, Any]],
) -> None:
    wanted = {
        (name, layout) for name, layouts in SUBSET.items() for layout in ("tp1", *layouts.split())
    }
    for key, row in results.items():  # first: a case that fails at tp1 has no other layout
        assert row["outcome"] == "same", (key, row)
        assert row["different"] == 0
        assert row["tensors"] >= 10, (key, row)
    assert set(results) == wanted


def test_no_rank_needs_more_than_its_own(
    results: dict[tuple[str, str], dict[str, Any]],
) -> None:
    """Other ranks' slices, layers and experts are not read."""
    for key, row in results.items():
        assert not row["eager"], (key, row)
        assert len(row["needed"]) == LAYOUTS[key[1]].world_size
        assert row["per_own"] <= MOST_PER_OWN, (key, row)
