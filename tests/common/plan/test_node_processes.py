"""The planner alone, each rank in a process of its own: a node reads each byte of a model once."""

from __future__ import annotations

import pytest

from benchmarks.planner_boxes import MODELS
from benchmarks.planner_ranks import CHUNK_BYTES, divide


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(
    "name",
    [
        "dense (Llama-3 8B)",
        "GQA, 2 KV heads",
        "MoE, a tensor for each expert",
        "MLA",
        "fp8, blocks",
    ],
)
def test_a_node_reads_each_byte_of_a_model_once(name: str, ranks: int) -> None:
    shares = divide(name, ranks, scale=0.05)
    assert 1.0 <= shares.ratio <= 1.01
    assert max(shares.fetched_bytes) - min(shares.fetched_bytes) <= 2 * CHUNK_BYTES
    # What each needs, by its own exact plan: together all of the model, and what they share.
    assert sum(shares.needed_bytes) >= shares.model_bytes
    assert all(
        needed <= fetched + received
        for needed, fetched, received in zip(
            shares.needed_bytes, shares.fetched_bytes, shares.received_bytes, strict=True
        )
    )
    assert max(shares.message_bytes) < 8192
    assert shares.requests < 2 * len(range(0, shares.model_bytes, CHUNK_BYTES)) + 20


def test_models_are_of_many_layers_where_they_are_not_scaled() -> None:
    sizes = {name: make(1.0).size_bytes for name, make in MODELS.items()}
    assert 15e9 < sizes["dense (Llama-3 8B)"] < 17e9
    assert 55e9 < sizes["MoE, a tensor for each expert"] < 62e9
