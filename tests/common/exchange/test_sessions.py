"""Whole loads by several ranks of one process: the same weights, and each byte fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.common.exchange.exchange_harness import load_ranks, make_tensors, settings_of


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return make_tensors()


@pytest.fixture
def directory(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_byte_is_fetched_once(
    directory: Path, tensors: dict[str, torch.Tensor], size: int
) -> None:
    outcomes = load_ranks(str(directory), size, settings_of())
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.model.faults(tensors) == []
    model_bytes = sum(value.nbytes for value in tensors.values())
    fetched = sum(outcome.report.fetched_bytes for outcome in outcomes)
    assert model_bytes <= fetched + 1024 * size
    assert fetched <= 1.01 * model_bytes
