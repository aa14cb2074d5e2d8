"""A registry with a model whose layers are compressed, and where it is unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fastload_common.config import Settings, load_settings
from fastload_common.testing.scripted_registry import ScriptedRegistry
from tests.common.load.unpacked.unpacked_models import forget


@pytest.fixture
def registry() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry() as made:
        yield made


@pytest.fixture(autouse=True)
def forget_afterwards() -> Iterator[None]:
    """What this process holds is not to outlive a test."""
    yield
    forget()


@pytest.fixture
def settings(registry: ScriptedRegistry, tmp_path: Path) -> Settings:
    extra = {"progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "1MiB", "max_attempts": "2"}
    places = {"oci_plain_http": registry.host, "cache_dir": str(tmp_path / "cache")}
    return load_settings(extra | places, {})


@pytest.fixture
def files(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    shards = {
        f"model-0000{number}-of-00002.safetensors": save({name: tensors[name] for name in half})
        for number, half in enumerate(halves, 1)
    }
    return shards | {"config.json": b'{"model_type": "x"}', "tokenizer.json": b"{}"}
