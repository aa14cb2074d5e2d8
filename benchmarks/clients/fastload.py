"""Our whole receiving path: S3 source with signing, fetcher, staging memory."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.cost import memory_bytes
from benchmarks.work import BUCKET, Item, Work, check
from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.load.request import RankPlace
from fastload_common.load.sizes import choose_sizes
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.stats import TransferStats

_LOOK_EVERY_S, _STILL_LOOKS, _MOST_LOOKS = 0.1, 5, 100


class FastloadClient:
    """Chunks of the settings' size through one `Fetcher`.

    Options: ``settings`` (further settings), ``fill`` (wait with the first chunk in hand until
    staging memory has filled).

    Attributes:
        baseline_bytes: memory before staging and fetcher were made.
    """

    def __init__(self, work: Work) -> None:
        settings = _settings(work)
        self._fill = bool((work.options or {}).get("fill"))
        self._source = open_source(f"s3://{BUCKET}", settings)
        # As a load does: one listing gives the identity of every object.
        self._ids = {listed.key: listed.object_id for listed in self._source.list()}
        self.baseline_bytes = memory_bytes(os.getpid())
        sizes = choose_sizes(settings, RankPlace(), work.total_bytes)
        self._chunk_bytes = sizes.chunk_bytes
        self._arena = Arena(sizes.chunk_bytes, sizes.slots)
        policy = sizes.policy(settings)
        self.stats = TransferStats()
        self._fetcher = Fetcher(self._source, self._arena, policy, SystemClock(), self.stats)

    def receive(self, items: tuple[Item, ...]) -> int:
        received_bytes = 0
        for filled in self._fetcher.fetch(self._chunks(items)):
            check(filled.data, filled.chunk.byte_range.start)
            if received_bytes == 0 and self._fill:
                _wait_until_memory_settles()
            received_bytes += len(filled.data)
            filled.release()
        return received_bytes

    def close(self) -> None:
        self._fetcher.close()
        self._arena.close()
        self._source.close()

    def _chunks(self, items: tuple[Item, ...]) -> list[Chunk]:
        chunks = []
        for item in items:
            for start in range(0, item.size_bytes, self._chunk_bytes):
                end = min(start + self._chunk_bytes, item.size_bytes)
                chunks.append(Chunk(self._ids[item.name], ByteRange(start, end), end - start))
        return chunks


def _wait_until_memory_settles() -> None:
    """Until it has not grown for half a second, or for ten seconds."""
    largest, still = 0, 0
    for _ in range(_MOST_LOOKS):
        time.sleep(_LOOK_EVERY_S)
        now_bytes = memory_bytes(os.getpid())
        still = still + 1 if now_bytes <= largest else 0
        largest = max(largest, now_bytes)
        if still >= _STILL_LOOKS:
            return


def _settings(work: Work) -> Settings:
    """The given shape; the defaults where it is 0."""
    given: dict[str, Any] = {"concurrency": work.connections, "chunk_bytes": work.chunk_bytes}
    given = {name: value for name, value in given.items() if value}
    return Settings(**given, **(work.options or {}).get("settings", {}))


def open_client(work: Work) -> FastloadClient:
    return FastloadClient(work)
