"""The planner's benchmark: its boxes, its rows, and what it says where orbax is absent."""

from __future__ import annotations

import importlib.metadata

import pytest

from benchmarks import planner
from benchmarks.planner_boxes import MODELS, build
from benchmarks.planner_orbax import OrbaxPlanner
from fastload_common.plan.extents import ReadTable

WAYS = {"alone", "node"}


def test_a_box_is_the_same_bytes_as_its_read() -> None:
    model = build("one", iter([((6, 10), 2, 0, 0), ((6, 10), 2, 1, 0), ((4, 2), 4, 0, 2)]))
    rows = model.reads(1, 2)
    spans = [ReadTable([read]).spans(0)[0].tolist() for read in rows]
    first, second, third = (tensor.start for tensor in model.tensors)
    assert (second - first, third - second) == (120, 120)
    assert spans[0] == [[first + 60, first + 120]]
    assert spans[1] == [[second + 20 * row + 10, second + 20 * row + 20] for row in range(6)]
    assert spans[2] == [[third + 16, third + 32]]
    # Two heads for four ranks: two of them take the same.
    assert model.tensors[2].bounds(2, 4) == model.tensors[2].bounds(3, 4) == ((2, 4), (0, 2))


def test_each_model_is_planned_in_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    found = planner.boxes(0.01, ranks=4)
    assert found["orbax"] == "not installed"
    assert set(found["models"]) == set(MODELS)
    for ways in found["models"].values():
        assert set(ways) == WAYS
        assert ways["node"]["bytes_over_model"] == pytest.approx(1.0, abs=0.01)
        assert ways["alone"]["bytes_over_model"] >= ways["node"]["bytes_over_model"] - 0.01


def test_the_nearest_relative_is_asked_about_the_same_boxes() -> None:
    try:
        orbax = OrbaxPlanner()
    except ImportError as error:
        pytest.skip(f"orbax-checkpoint: {error}")
    model = build("one", iter([((600, 1000), 2, 0, 0), ((600, 1000), 2, 1, 0)]))
    found = orbax.plan(model.boxes(1, 2), 8 << 20)
    assert found["needed"] == 600 * 1000 * 2


@pytest.mark.torch
def test_a_rank_is_timed_from_its_trace_to_its_first_request() -> None:
    found = planner.agreement(1000)
    assert found["node_over_model"] == pytest.approx(1.0, abs=1e-4)
    assert found["total_s"] == pytest.approx(sum(found["steps_s"].values()))
    assert set(found["steps_s"]) >= {"trace", "needs", "encode", "decode", "plan_node", "plan_for"}
    assert len(found["trace_s"]) == len(found["message_bytes"]) == 8
    bars = planner.bars_of({"agreement": found, "ranks": {"m": {"node_over_model": 1.02}}})
    assert [bar.passed for bar in bars] == [True, False]
