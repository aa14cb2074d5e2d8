"""Fixtures of the node cache's tests: a checkpoint, a store, and loads that keep all they may."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload_common.range_cache.place import directory_of
from fastload_common.range_cache.writer import finish_writes
from fastload_common.testing.rig import Rig
from tests.common.exchange.conftest import save
from tests.common.exchange.exchange_harness import Outcome, load_ranks, make_tensors, settings_of
from tests.common.range_cache.half_empty import half_empty

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def roomy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", half_empty(os.statvfs))
        yield


@pytest.fixture(scope="session")
def tensors() -> Tensors:
    """11 MiB, of several blocks of the cache."""
    return make_tensors(layers=3, width=512)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint"), tensors)


@pytest.fixture
def rig(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """An S3 server with the checkpoint below ``s3://models/m``."""
    with Rig() as rig:
        for path in checkpoint.glob("*.safetensors"):
            rig.put("models", f"m/{path.name}", path.read_bytes())
        for name, value in rig.environ().items():
            monkeypatch.setenv(name, value)
        yield rig


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What FASTLOAD_NODE_CACHE is set to."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path


def load(root: Path, ranks: int, uri: str = "s3://models/m", **settings: Any) -> list[Outcome]:
    """Load with the cache, let it write all it took, and see in the reports what became of it."""
    wide = {"memory_bytes": "256MiB", "node_cache": str(root)}
    outcomes = load_ranks(uri, ranks, settings_of(**{**wide, **settings}))
    assert finish_writes(30)
    for outcome in outcomes:
        # The report is of the load's end; a slow disk has some still before it then.
        cache = None if outcome.session is None else outcome.session._caching._cache
        if cache is not None:
            outcome.report.node_cache = cache.facts()
    return outcomes


def all_right(outcomes: list[Outcome], tensors: Tensors) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.model.faults(tensors) == []


def total(outcomes: list[Outcome], field: str) -> int:
    """A number of the report's node cache, of all ranks."""
    return sum(int(outcome.report.node_cache[field]) for outcome in outcomes)


def fetched(outcomes: list[Outcome]) -> int:
    return sum(int(outcome.report.fetched_bytes) for outcome in outcomes)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    with _mounted(tmp_path / "small", "6m") as path:
        yield path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB, which may be mounted anew."""
    with _mounted(tmp_path / "disk", "64m") as path:
        yield path


@contextmanager
def _mounted(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def size_of(tensors: Tensors) -> int:
    return sum(value.nbytes for value in tensors.values())


def sent(rig: Rig) -> int:
    """Bytes of objects that the store has sent since the last call."""
    found = sum(request.sent_bytes for request in rig.log.gets())
    rig.log.clear()
    return found


def files(root: Path, suffix: str = ".data") -> list[Path]:
    return sorted(directory_of(root).glob(f"*{suffix}"))
