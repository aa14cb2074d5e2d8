"""Experts: in one tensor or in many, spread over ranks, and what each rank reads of them.

All through vLLM's own layer of experts. SGLang's are cases of its adapter.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.cases.engine_process import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

FORMS = ("split", "pairs", "fused", "transposed")


def load(engine: EngineProcess, form: str, **more: Any) -> list[dict[str, Any]]:
    arguments: dict[str, Any] = {"form": form, "experts": 8, "tensor": 2, "spread": False} | more
    rows: list[dict[str, Any]] = engine.call("engine_experts:load_experts", **arguments)
    for row in rows:
        assert row["different"] == []
        assert row["needed_bytes"] == row["held_bytes"]
        assert row["eager_reason"] is None
        assert row["settled_reads"] == 0
    return rows


# T05


@pytest.mark.parametrize("spread", [False, True])
def test_t05_all_forms_give_the_same(engine: EngineProcess, spread: bool) -> None:
    """One tensor for each expert, two for each, or all in one; sliced along dim 0, 1 or 2."""
    digests = {form: [row["digest"] for row in load(engine, form, spread=spread)] for form in FORMS}
    assert len(digests["split"]) == 2
    assert digests["split"][0] != digests["split"][1]
    assert all(found == digests["split"] for found in digests.values())


@pytest.mark.parametrize("form", ["fused", "transposed"])
def test_t05_strided_slices_are_few_requests(engine: EngineProcess, form: str) -> None:
    """Rows of 128 to 512 bytes, thousands of them: never one request for each."""
    rows = load(engine, form, merge_gap_bytes="1MiB")
    for row in rows:
        assert row["requests"] <= 2
        # Half of what lies between the first and the last byte is needed.
        assert row["fetched_bytes"] <= 2 * row["needed_bytes"]
        assert row["over_read_bytes"] == row["fetched_bytes"] - row["needed_bytes"]


@pytest.mark.parametrize("form", ["fused", "transposed"])
def test_t05_experts_of_others_are_not_read(engine: EngineProcess, form: str) -> None:
    """Of one tensor with all experts a rank reads its own; it is contiguous in the file."""
    for row in load(engine, form, spread=True):
        assert row["fetched_bytes"] <= 1.01 * row["model_bytes"] / 2


# T12


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_t12_each_placement(engine: EngineProcess, form: str, placement: str) -> None:
    rows = load(engine, form, experts=16, tensor=4, spread=True, placement=placement)
    slots = [row["slots"] for row in rows]
    if placement == "linear":
        assert slots == [[4 * rank + slot for slot in range(4)] for rank in range(4)]
    else:
        assert slots == [[rank + 4 * slot for slot in range(4)] for rank in range(4)]
    for row in rows:
        assert row["needed_bytes"] * 4 == row["model_bytes"]


@pytest.mark.parametrize("spread", [False, True])
def test_t12_replicas_share_the_experts(engine: EngineProcess, spread: bool) -> None:
    """Two replicas of two ranks: each has the attention alone, and a quarter of the experts."""
    rows = load(engine, "split", experts=16, tensor=2, data=2, spread=spread)
    assert len({row["digest"] for row in rows}) == 4
    for row in rows:
        assert row["needed_bytes"] * 4 == row["model_bytes"]


def test_t12_redundant_experts_are_filled(engine: EngineProcess) -> None:
    """With load balancing a rank has slots for copies of experts that others have too."""
    rows = load(engine, "split", experts=16, tensor=4, spread=True, redundant=4)
    slots = [row["slots"] for row in rows]
    assert [len(found) for found in slots] == [5, 5, 5, 5]
    assert sorted(slot for found in slots for slot in found) == sorted([*range(16), 0, 1, 2, 3])
    for row in rows:
        # The five experts of its slots, and nothing else.
        assert row["needed_bytes"] == row["model_bytes"] * 5 // 16


def test_t12_scales_of_remote_experts_are_read(engine: EngineProcess) -> None:
    """NVFP4: the kernel's scale is the largest of all experts, so every rank has all of them."""
    rows = engine.call("engine_experts:nvfp4_experts", experts=16, tensor=4)
    for row in rows:
        assert row["different"] == []
        assert row["input_scales"] == [100.0 + expert for expert in range(16)]
        # A quarter of the experts, and 4 bytes for each of the three scales of the others.
        quarter = row["model_bytes"] // 4
        assert row["needed_bytes"] == quarter + 12 * 3 * 4


# T13


@pytest.mark.parametrize("form", FORMS)
def test_t13_bytes_of_a_rank(engine: EngineProcess, form: str) -> None:
    rows = load(engine, form, experts=16, tensor=8, spread=True)
    for row in rows:
        assert row["fetched_bytes"] <= 1.05 * row["model_bytes"] / 8


def test_t13_names_of_quantized_experts(engine: EngineProcess) -> None:
    """The trace knows no suffixes: ``weight_packed``, ``qweight``, scales are read where used."""
    rows = engine.call("engine_experts:packed_experts", experts=16, tensor=8)
    for row in rows:
        assert row["different"] == []
        assert row["fetched_bytes"] <= 1.05 * row["model_bytes"] / 8
