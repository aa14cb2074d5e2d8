"""Ranks that are processes: what they load, what they fetch, and how they end when one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastload_common.testing.rig import Rig
from tests.common.exchange.rank_processes import RankProcesses


@pytest.mark.parametrize("size", [2, 4])
def test_directory(
    processes: RankProcesses,
    checkpoint: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    size: int,
) -> None:
    found = processes.run(tmp_path, str(checkpoint), size, checkpoint)
    _all_is_well(found, tensors)


def test_s3(
    processes: RankProcesses,
    rig: Rig,
    checkpoint: Path,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    found = processes.run(tmp_path, "s3://models/m", 2, checkpoint, environ=rig.environ())
    _all_is_well(found, tensors)
    model_bytes = sum(value.nbytes for value in tensors.values())
    # Headers are read from the start of an object, by each rank.
    bodies = [row for row in rig.log.gets() if row.byte_range and row.byte_range.start]
    assert model_bytes <= sum(row.sent_bytes for row in bodies) < 1.01 * model_bytes


def _all_is_well(found: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for row in found["ranks"]:
        result = row["result"]
        assert result["error"] is None
        assert result["faults"] == []
        assert result["threads"] == []
        assert result["descriptors"] == []
        assert result["report"]["node"]["exchange"] == "on"
    model_bytes = sum(value.nbytes for value in tensors.values())
    fetched = sum(row["result"]["report"]["fetched_bytes"] for row in found["ranks"])
    assert fetched <= 1.01 * model_bytes
