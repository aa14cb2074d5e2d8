"""A fetcher with everything around it, for the tests of this directory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastload_common.clock import Clock, SystemClock
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.staging.arena import Arena
from fastload_common.testing.scripted_source import ScriptedSource
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.stats import TransferStats

CHUNK_BYTES = 1000
POLICY = TransferPolicy(
    concurrency=4,
    max_attempts=3,
    connect_timeout_s=5,
    read_timeout_s=5,
    backoff_base_s=0.001,
    progress_bytes=100,
    hedging=False,
)

MakeFetcher = Callable[..., "Bench"]


class Bench:
    """One fetcher with everything around it."""

    def __init__(
        self,
        source: ScriptedSource,
        *,
        slots: int = 4,
        clock: Clock | None = None,
        random: Callable[[], float] = lambda: 0.5,
        **policy: Any,
    ) -> None:
        self.source = source
        self.arena = Arena(CHUNK_BYTES, slots)
        self.stats = TransferStats()
        self.policy = replace(POLICY, **policy)
        self.fetcher = Fetcher(
            source, self.arena, self.policy, clock or SystemClock(), self.stats, random=random
        )

    def chunks(self, key: str = "a", size_bytes: int = CHUNK_BYTES) -> list[Chunk]:
        """The whole object in chunks."""
        object_id = self.source.object_id(key)
        edges = [*range(0, object_id.size_bytes, size_bytes), object_id.size_bytes]
        return [
            Chunk(object_id, ByteRange(start, end), end - start)
            for start, end in itertools.pairwise(edges)
        ]

    def read(self, chunks: list[Chunk]) -> dict[Chunk, bytes]:
        """Fetch and copy out, releasing at once."""
        found = {}
        for filled in self.fetcher.fetch(chunks):
            assert filled.chunk not in found
            found[filled.chunk] = bytes(filled.data)
            filled.release()
        return found

    def expected(self, chunks: list[Chunk]) -> dict[Chunk, bytes]:
        return {chunk: self.source.read(chunk.object_id, chunk.byte_range) for chunk in chunks}


def receiving_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("fastload-receive")]


def content(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes in which no two places look alike."""
    return bytes((i * 7 + i // 251 + seed * 31) % 256 for i in range(size_bytes))
