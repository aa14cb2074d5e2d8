"""Ranks that are processes: what they load, what they fetch, and how they end when one does."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fastload_common.testing.rig import Rig
from tests.common.exchange.rank_processes import RankProcesses

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("size", [2, 4])
def test_directory(
    processes: RankProcesses,
    checkpoint: Path,
    tensors: Tensors,
    tmp_path: Path,
    size: int,
) -> None:
    found = processes.run(tmp_path, str(checkpoint), size, checkpoint)
    _all_is_well(found, tensors)


def test_s3(
    processes: RankProcesses,
    rig: Rig,
    checkpoint: Path,
    tensors: Tensors,
    tmp_path: Path,
) -> None:
    found = processes.run(tmp_path, "s3://models/m", 2, checkpoint, environ=rig.environ())
    _all_is_well(found, tensors)
    model_bytes = sum(value.nbytes for value in tensors.values())
    # Headers are read from the start of an object, by each rank.
    bodies = [row for row in rig.log.gets() if row.byte_range and row.byte_range.start]
    assert model_bytes <= sum(row.sent_bytes for row in bodies) < 1.01 * model_bytes


@pytest.mark.parametrize("seed", range(12))
def test_a_killed_rank_ends_all_or_none(
    processes: RankProcesses,
    large_checkpoint: Path,
    tmp_path: Path,
    seed: int,
) -> None:
    """At any moment from the start of its trace on: as the kernel kills for want of memory."""
    random = Random(seed)
    size = random.choice([2, 3, 5])
    victim = random.randrange(size)
    found = processes.run(
        tmp_path,
        str(large_checkpoint),
        size,
        large_checkpoint,
        slow={str(random.randrange(size)): 0.002},
        signal={str(victim): [signal.SIGKILL, random.uniform(0, 0.4)]},
        settings={"chunk_bytes": "64KiB", "memory_bytes": f"{max(4, size) * 256}KiB"},
    )
    killed = found["ranks"][victim]["status"] == -signal.SIGKILL
    for rank, row in enumerate(found["ranks"]):
        if killed and rank == victim:
            continue
        result = row["result"]
        assert result["threads"] == []
        assert result["descriptors"] == []
        if result["error"] is None:
            assert result["faults"] == []
            continue
        assert killed, result["error"]
        assert result["error"].startswith(f"PeerError: rank {victim} (pid ")
        assert "ended without a word (killed?)" in result["error"]
        assert result["failed_s"] - row["gone_s"] < 5


def test_a_rank_killed_in_its_trace_ends_the_others(
    processes: RankProcesses, checkpoint: Path, tmp_path: Path
) -> None:
    """They wait for what it needs."""
    found = processes.run(
        tmp_path,
        str(checkpoint),
        3,
        checkpoint,
        stop_in_trace=[1],
        signal={"1": [signal.SIGKILL, 0.3]},
    )
    assert found["ranks"][1]["status"] == -signal.SIGKILL
    for rank in (0, 2):
        row = found["ranks"][rank]
        assert row["result"]["error"].startswith("PeerError: rank 1 (pid ")
        assert row["result"]["failed_s"] - row["gone_s"] < 5


def test_a_stopped_rank_is_waited_for(
    processes: RankProcesses, large_checkpoint: Path, large_tensors: Tensors, tmp_path: Path
) -> None:
    found = processes.run(
        tmp_path,
        str(large_checkpoint),
        3,
        large_checkpoint,
        signal={"1": [signal.SIGSTOP, 0.05]},
        slow={"1": 0.002},
    )
    _all_is_well(found, large_tensors)


def test_two_engines_at_once(
    processes: RankProcesses, checkpoint: Path, tensors: Tensors, tmp_path: Path
) -> None:
    with RankProcesses() as others, ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(each.run, tmp_path / name, str(checkpoint), 2, checkpoint)
            for name, each in (("one", processes), ("other", others))
        ]
        for run in runs:
            _all_is_well(run.result(), tensors)


def test_an_error_of_one_rank_is_every_ranks(
    processes: RankProcesses, checkpoint: Path, tmp_path: Path
) -> None:
    found = processes.run(tmp_path, str(checkpoint), 3, checkpoint, fail={"2": "layers.1.norm"})
    errors = [row["result"]["error"] for row in found["ranks"]]
    assert errors[2].startswith("TensorMismatchError: test could not take tensor 'layers.1.norm'")
    for error in errors[:2]:
        assert error.startswith("PeerError: rank 2 (pid ")
        assert "could not take tensor 'layers.1.norm'" in error


def test_nothing_is_in_dev_shm_and_the_memory_is_bounded(
    processes: RankProcesses, large_checkpoint: Path, large_tensors: Tensors, tmp_path: Path
) -> None:
    settings = {"chunk_bytes": "64KiB", "memory_bytes": "1MiB"}
    found = processes.run(tmp_path, str(large_checkpoint), 8, large_checkpoint, settings=settings)
    _all_is_well(found, large_tensors)
    assert [name for name in os.listdir("/dev/shm") if "fastload" in name] == []
    for row in found["ranks"]:
        # Two slots each, whoever reads them.
        assert row["result"]["report"]["peak_staging_bytes"] <= 2 * 64 * 1024


def _all_is_well(found: dict[str, Any], tensors: Tensors) -> None:
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
