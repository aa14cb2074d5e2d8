"""Which part of a tensor a rank takes: what vLLM's own weight loaders copy, no more and no less.

Numbered tensors say what a layer holds: each element is counted once, and these bytes are what
the load must have needed. SGLang's loaders are cases of its adapter.
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


def is_exact(row: dict[str, Any]) -> bool:
    """Every byte as the engine has it, and none needed that it does not hold."""
    assert row["different"] == []
    assert row["eager_reason"] is None
    assert row["settled_reads"] == 0
    needed: int = row["needed_bytes"]
    assert needed <= row["fetched_bytes"]
    held: int = row["held_bytes"]
    return needed == held


# T01


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_t01_replicated_kv_heads(engine: EngineProcess, kv_heads: int, tensor: int) -> None:
    """All ranks of a layer whose q is in one file and whose k and v are in another one."""
    rows = engine.call("engine_slices:qkv_heads", heads=16, kv_heads=kv_heads, tensor=tensor)
    assert all(is_exact(row) for row in rows)
    per_head = max(1, tensor // kv_heads)
    for rank, row in enumerate(rows):
        # Ranks that share a head hold the same; others do not.
        assert row["kv"] == rows[rank - rank % per_head]["kv"]
    assert len({str(row["kv"]) for row in rows}) == min(tensor, kv_heads)


def test_t01_heads_that_cannot_be_divided_are_the_engines_to_refuse(
    engine: EngineProcess, tmp_path: Any
) -> None:
    from tests.cases.engine_checkpoints import write_numbered

    model = write_numbered(
        tmp_path / "m",
        "qwen3",
        num_attention_heads=6,
        num_key_value_heads=3,
        hidden_size=96,
        num_hidden_layers=1,
    )
    said = engine.call("engine_models:load_failures", model=str(model), layout={"tensor": 2})
    assert said["auto"].startswith("AssertionError")
    assert said["fastload"] == said["auto"]


# T03


@pytest.mark.parametrize(
    ("kind", "n", "k", "tensor"),
    [
        ("column", 1536, 1536, 4),
        ("column", 2048, 2112, 2),
        ("row", 576, 1536, 2),
        ("row", 2112, 1536, 4),
        ("row", 1536, 2048, 8),
        ("gate_up", 1536, 576, 4),
        ("qkv", 1536, 512, 2),
    ],
)
def test_t03_scales_of_blocks(
    engine: EngineProcess, kind: str, n: int, k: int, tensor: int
) -> None:
    """The engine slices the scales itself: from the block where the rank's rows begin."""
    rows = engine.call("engine_slices:fp8_block", kind=kind, n=n, k=k, tensor=tensor)
    shards = {"gate_up": 2, "qkv": 3}.get(kind, 1)
    own_n, own_k = (n, k // tensor) if kind == "row" else (n // tensor, k)
    scales = -(-own_n // 128) * -(-own_k // 128) * 4
    for row in rows:
        is_exact(row)
        assert row["held_bytes"] == shards * scales
        assert row["needed_bytes"] == shards * (own_n * own_k + scales)


@pytest.mark.parametrize(
    ("kind", "n", "k", "tensor"),
    [
        ("column", 576, 512, 2),
        ("column", 2112, 512, 4),
        ("row", 512, 2112, 2),
        ("row", 512, 576, 8),
    ],
)
def test_t03_shards_that_cut_a_block_are_refused_by_the_engine(
    engine: EngineProcess, kind: str, n: int, k: int, tensor: int
) -> None:
    """Before anything is read, so in the engine's own words."""
    rows = engine.call("engine_slices:fp8_block", kind=kind, n=n, k=k, tensor=tensor)
    assert len(rows) == tensor
    for row in rows:
        assert "is not divisible by weight quantization block" in row["not_built"]


@pytest.mark.parametrize(("n", "tensor"), [(576, 2), (2112, 8)])
def test_t03_fused_shards_that_cut_a_block_fail_in_the_engines_words(
    engine: EngineProcess, n: int, tensor: int
) -> None:
    """vLLM builds these, and its loader then reaches beyond the scales of some rank."""
    rows = engine.call("engine_slices:fp8_block", kind="gate_up", n=n, k=512, tensor=tensor)
    for row in rows:
        kind, _, words = row["refused"].partition(": ")
        assert kind in ("RuntimeError", "IndexError")
        assert row["said"].startswith("TensorMismatchError: ")
        assert words in row["said"]
        assert "layer.weight_scale_inv." in row["said"]


# T08


@pytest.mark.parametrize("group", [128, -1])
@pytest.mark.parametrize("kind", ["column", "row", "gate_up", "qkv"])
def test_t08_gptq_packs_along_the_input(engine: EngineProcess, kind: str, group: int) -> None:
    rows = engine.call(
        "engine_slices:packed", method="gptq", kind=kind, k=512, n=256, tensor=2, group=group
    )
    shards = {"gate_up": 2, "qkv": 3}.get(kind, 1)
    own_k, own_n = (256, 256) if kind == "row" else (512, 128)
    # With one group for all of the input each rank of a row-parallel layer needs its scales.
    groups = 1 if group == -1 else own_k // 128
    for row in rows:
        is_exact(row)
        assert row["needed_bytes"] == shards * 4 * (
            own_k * own_n // 8 + groups * own_n + groups * own_n // 8
        )


def test_t08_act_order_is_the_engines_to_take_or_to_refuse(engine: EngineProcess) -> None:
    """This vLLM has no ``g_idx`` any more: it refuses a checkpoint whose order matters."""
    call = "engine_slices:gptq_config_refusal"
    assert "desc_act=True" in engine.call(call, group=128, desc_act=True)
    assert engine.call(call, group=128, desc_act=False) is None
    assert engine.call(call, group=-1, desc_act=True) is None


def test_t08_tensors_that_the_engine_does_not_know_are_not_read(engine: EngineProcess) -> None:
    """Such as the ``g_idx`` of each layer."""
    row = engine.call("engine_slices:ignored_tensor")
    assert is_exact(row)
    assert row["needed_bytes"] < row["model_bytes"]


# T09


@pytest.mark.parametrize("kind", ["column", "row", "gate_up", "qkv"])
def test_t09_awq_packs_along_the_output(engine: EngineProcess, kind: str) -> None:
    rows = engine.call("engine_slices:packed", method="awq", kind=kind, k=512, n=256, tensor=2)
    shards = {"gate_up": 2, "qkv": 3}.get(kind, 1)
    own_k, own_n = (256, 256) if kind == "row" else (512, 128)
    groups = own_k // 128
    for row in rows:
        is_exact(row)
        assert row["needed_bytes"] == shards * 4 * (
            own_k * own_n // 8 + groups * own_n + groups * own_n // 8
        )


def test_t09_groups_that_cannot_be_divided_are_the_engines_to_refuse(engine: EngineProcess) -> None:
    rows = engine.call("engine_slices:packed", method="awq", kind="row", k=384, n=256, tensor=2)
    assert {row["not_built"] for row in rows} == {
        "ValueError: The input size is not aligned with the quantized weight shape. This can be "
        "caused by too large tensor parallel size."
    }
