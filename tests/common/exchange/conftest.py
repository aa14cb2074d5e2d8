"""Fixtures of the exchange's tests: a checkpoint, and ranks that are processes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.testing.rig import Rig
from tests.common.exchange.exchange_harness import make_tensors
from tests.common.exchange.rank_processes import RankProcesses


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No descriptor and no thread of ours is left by a test."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    left = [t.name for t in threading.enumerate() if t.name.startswith("fastload")]
    assert left == []


@pytest.fixture(scope="session")
def tensors() -> dict[str, torch.Tensor]:
    return make_tensors()


@pytest.fixture(scope="session")
def large_tensors() -> dict[str, torch.Tensor]:
    """11 MiB: more than the slots of the tests hold."""
    return make_tensors(layers=3, width=512)


def save(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Two shards in a directory."""
    names = sorted(tensors)
    for number in (1, 2):
        part = {name: tensors[name] for name in names[number - 1 :: 2]}
        save_file(part, directory / f"model-0000{number}-of-00002.safetensors")
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint"), tensors)


@pytest.fixture(scope="session")
def large_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, large_tensors: dict[str, torch.Tensor]
) -> Path:
    return save(tmp_path_factory.mktemp("large"), large_tensors)


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses() as found:
        yield found


@pytest.fixture
def rig(checkpoint: Path) -> Iterator[Rig]:
    """An S3 server with the checkpoint below ``s3://models/m``."""
    with Rig() as rig:
        for path in checkpoint.glob("*.safetensors"):
            rig.put("models", f"m/{path.name}", path.read_bytes(), checksums=["crc64nvme"])
        yield rig
