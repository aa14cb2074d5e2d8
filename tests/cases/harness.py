"""Models on the fault rig, and loads of them the way that engines load: receivers and all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from fastload_common.config import Settings
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.ranges import ByteRange
from fastload_common.testing.checkpoints import TensorSpec, encode_file, random_tensor
from fastload_common.testing.rig import Rig
from tests.cases.reading import BUCKET, CHUNK_BYTES, URI, ranges, settings

__all__ = [
    "BUCKET",
    "CHUNK_BYTES",
    "MODEL",
    "SHARDS",
    "URI",
    "StoredModel",
    "load",
    "load_in",
    "make_model",
    "ranges",
    "settings",
    "signed_with",
    "use",
]

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass
class StoredModel:
    """Two shards of about ten chunks each, whose tensors are known.

    Attributes:
        files: key below the prefix to its bytes.
        tensors: name to what must be loaded.
    """

    files: dict[str, bytes]
    tensors: dict[str, TensorSpec] = field(repr=False)

    def put(self, rig: Rig, bucket: str = BUCKET, prefix: str = "m") -> None:
        for name, data in self.files.items():
            rig.put(bucket, f"{prefix}/{name}", data)

    def agrees(self, found: Mapping[str, bytes]) -> bool:
        return {name: spec.data for name, spec in self.tensors.items()} == dict(found)

    def body_of(self, file: str) -> ByteRange:
        """All of a file but its header."""
        data = self.files[file]
        return ByteRange(8 + int.from_bytes(data[:8], "little"), len(data))


def make_model(seed: int = 0, rows: int = 700) -> StoredModel:
    files: dict[str, bytes] = {}
    tensors: dict[str, TensorSpec] = {}
    for number, file in enumerate(SHARDS):
        specs = {
            f"layers.{number}.{part}.weight": random_tensor("U8", [rows, 333], 10 * seed + part)
            for part in range(3)
        }
        files[file] = encode_file(specs)
        tensors |= specs
    return StoredModel(files, tensors)


MODEL = make_model()


def load(uri: str = URI, with_: Settings | None = None) -> dict[str, bytes]:
    """Load as an engine does, through `LoadSession`, its trace and its receivers; all bytes."""
    with LoadSession([WeightSource(uri)], with_ or settings()) as session:
        return load_in(session)


def load_in(session: LoadSession) -> dict[str, bytes]:
    targets: dict[str, torch.Tensor] = {}

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            targets[name] = torch.zeros(weight.shape, dtype=weight.dtype)
            targets[name].copy_(weight)

    session.load(None, load_weights)  # type: ignore[arg-type]
    return {name: bytes(value.flatten().numpy().tobytes()) for name, value in targets.items()}


def use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it this process's store."""
    for name, value in rig.environ().items():
        monkeypatch.setenv(name, value)


def signed_with(rig: Rig) -> list[str]:
    """The access key of every request so far; ``nobody`` for unsigned ones."""
    found = []
    for request in rig.log.requests():
        match = re.search(r"Credential=([^/]*)/", request.headers.get("authorization", ""))
        found.append(match.group(1) if match else "nobody")
    return found
