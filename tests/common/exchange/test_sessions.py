"""Whole loads by several ranks of one process: the same weights, and each byte fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.common.exchange.exchange_harness import load_ranks, settings_of


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_byte_is_fetched_once(
    checkpoint: Path, tensors: dict[str, torch.Tensor], size: int
) -> None:
    outcomes = load_ranks(str(checkpoint), size, settings_of())
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.model.faults(tensors) == []
    model_bytes = sum(value.nbytes for value in tensors.values())
    fetched = sum(outcome.report.fetched_bytes for outcome in outcomes)
    assert model_bytes <= fetched + 1024 * size
    assert fetched <= 1.01 * model_bytes
