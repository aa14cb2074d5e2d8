"""A model in a registry, for the tests of both engines."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from fastload_common.testing.registry_server import FILEPATH, RegistryServer
from tests.common.pull.images import LAYER, push_layers

__all__ = [
    "CHUNK_BYTES",
    "MOST",
    "push_compressed",
    "push_files",
    "push_image",
    "served_bytes",
    "write_model",
]

MOST = 1.01
"""Bytes that the registry serves / bytes of the model, of all processes of an engine."""
CHUNK_BYTES = 4 << 20
"""What a repeated request may cost: on a busy machine some look slow and are raced."""

_RAW = "application/vnd.cncf.model.weight.v1.raw"
# Large enough that headers, which each process reads, are no tenth of a percent of it.
_SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def write_model(directory: Path) -> Path:
    """153 MB in two shards."""
    from fastload_common.testing.tiny_models import write_tiny_model

    return write_tiny_model(directory, "qwen3", max_shard_bytes=90_000_000, **_SHAPE)


def push_files(registry: RegistryServer, repository: str, model: Path) -> None:
    """As an artifact ``:v``: each file is a layer."""
    layers = [
        registry.push_blob(repository, file.read_bytes(), _RAW, {FILEPATH: file.name})
        for file in sorted(model.iterdir())
    ]
    registry.push_manifest(repository, "v", layers)


def push_image(registry: RegistryServer, repository: str, model: Path) -> None:
    """As an image ``:v`` of one layer that is not compressed, in the folder ``models/m``."""
    tar = _packed(model, "models/m")
    registry.push_manifest(repository, "v", [registry.push_blob(repository, tar, LAYER)])


def push_compressed(registry: RegistryServer, how: str, model: Path) -> None:
    """As an image ``<how>:v`` whose every file is a compressed layer, in the same folder."""
    tars = [_packed(file, f"models/m/{file.name}") for file in sorted(model.iterdir())]
    push_layers(registry, how, tars, [how], "v")


def served_bytes(registry: RegistryServer, repository: str, since: int) -> int:
    """What the registry's own log says that it sent of a repository."""
    path = f"/v2/{repository}/"
    return sum(one.body_bytes for one in registry.requests(since) if one.path.startswith(path))


def _packed(path: Path, name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(path, name)
    return out.getvalue()
