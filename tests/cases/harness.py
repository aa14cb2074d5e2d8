"""Models on the fault rig, and loads of them the way that engines load: receivers and all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from fastload_common.clock import SystemClock
from fastload_common.config import Settings, load_settings
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.testing.checkpoints import TensorSpec, encode_file, random_tensor
from fastload_common.testing.rig import Rig
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.stats import TransferStats

CHUNK_BYTES = 64 * 1024
BUCKET = "bucket"
URI = f"s3://{BUCKET}/m"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def settings(**changes: object) -> Settings:
    """Small chunks, few connections, and nothing on the terminal."""
    plain: dict[str, object] = {
        "progress": "off",
        "chunk_bytes": CHUNK_BYTES,
        "memory_bytes": 16 * CHUNK_BYTES,
        "concurrency": 4,
        "max_attempts": 4,
        "deadline_s": 60,
    }
    return load_settings(plain | changes, {})


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


class Ranges:
    """One object read through source and fetcher, for what a load as a whole does too much of."""

    def __init__(
        self, uri: str, with_: Settings, random: Callable[[], float], slots: int = 4
    ) -> None:
        self.source = open_source(uri, with_)
        self.arena = Arena(CHUNK_BYTES, slots)
        self.stats = TransferStats()
        self.fetcher = Fetcher(
            self.source,
            self.arena,
            TransferPolicy.from_settings(with_),
            SystemClock(),
            self.stats,
            random=random,
        )

    def chunks(self, object_id: ObjectId) -> list[Chunk]:
        edges = range(0, object_id.size_bytes, CHUNK_BYTES)
        return [
            Chunk(object_id, ByteRange(start, min(start + CHUNK_BYTES, object_id.size_bytes)), 1)
            for start in edges
        ]

    def read(self, object_id: ObjectId) -> bytes:
        found = bytearray(object_id.size_bytes)
        for filled in self.fetcher.fetch(self.chunks(object_id)):
            place = filled.chunk.byte_range
            found[place.start : place.end] = filled.data
            filled.release()
        return bytes(found)


@contextlib.contextmanager
def ranges(
    uri: str = URI, with_: Settings | None = None, random: Callable[[], float] = lambda: 0.0
) -> Iterator[Ranges]:
    """Reads of ranges without jitter: what is asked again is asked at once."""
    made = Ranges(uri, with_ or settings(), random)
    try:
        yield made
    finally:
        made.fetcher.close()
        leased = made.arena.leased_count
        made.arena.close()
        made.source.close()
    assert leased == 0


def use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it this process's store."""
    for name, value in rig.environ().items():
        monkeypatch.setenv(name, value)
