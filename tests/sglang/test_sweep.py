"""Some of SGLang's architectures, bit for bit, in real ranks; `make sweep-sglang` runs all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.sglang.sweep.run import SUBSET, sweep
from tests.sweep.ranks import Ranks
from tests.sweep.results import Results

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def results(directory: Path, request: pytest.FixtureRequest) -> Results:
    found = Results(directory / "results.jsonl")
    sweep(SUBSET, directory, found)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SUBSET)
@pytest.mark.parametrize("layout", ["tp1", "tp2"])
def test_all_tensors_are_the_default_loaders(results: Results, name: str, layout: str) -> None:
    result = results.get(name, layout)
    assert result is not None
    assert result.outcome == "same", result.line()
    assert result.tensors > 20
    # A draft has embeddings of its own, until it is given its target's.
    assert result.untouched == (2 * int(layout[-1]) if " draft" in name else 0)
    assert result.eager == ""


def test_loaders_with_threads_are_traced(directory: Path, results: Results) -> None:
    """Nothing is read tensor by tensor, and each rank reads its part."""
    name = "DeepseekV3ForCausalLM"
    command = {"directory": str(directory / "models" / name), "architecture": name}
    with Ranks(2, directory, "tests.sglang.sweep.rank") as ranks:
        wanted = ranks.ask({"op": "default", **command})
        found = ranks.ask({"op": "fastload", **command})
    assert [answer["ok"] for answer in wanted] == [True, True]
    assert [answer["different"] for answer in found] == [[], []]
    for answer in found:
        report = answer["report"]
        assert report["settled_reads"] == 0
        assert report["needed_bytes"] < 0.8 * report["model_bytes"]
        assert report["node"]["exchange"] == "on"
        assert report["node"]["node_fetched_bytes"] <= 1.01 * report["model_bytes"]
