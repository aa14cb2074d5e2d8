"""A fetch by way of a node cache, over a scripted source, with everything around it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastload_common.clock import Clock, SystemClock
from fastload_common.plan.records import Chunk
from fastload_common.range_cache.entry import Entry, Identity
from fastload_common.range_cache.fetching import CachedFetch
from fastload_common.range_cache.node_cache import NodeCache
from fastload_common.range_cache.place import directory_of
from fastload_common.ranges import ByteRange
from fastload_common.staging.arena import Arena
from fastload_common.testing.scripted_source import ScriptedSource
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.stats import TransferStats
from fastload_common.units import KIB, MIB
from tests.common.transfer.transfer_bench import POLICY

CHUNK_BYTES = 300 * KIB
SIZE_BYTES = 3 * MIB + 4321
DATA = random.Random(7).randbytes(SIZE_BYTES)


class CacheBench:
    """A context manager: nothing is leased and no request is open at its end."""

    def __init__(
        self,
        root: Path,
        *,
        slots: int = 8,
        threads: int = 2,
        budget_bytes: int = 64 * MIB,
        patience_s: float = 30.0,
        clock: Clock | None = None,
        faults: Any = None,
    ) -> None:
        self.source = ScriptedSource({"a": DATA}, faults=faults or {})
        self.object_id = self.source.object_id("a")
        self.arena = Arena(CHUNK_BYTES, slots)
        self.stats = TransferStats()
        clock = clock or SystemClock()
        policy = replace(POLICY, concurrency=4)
        self.fetcher = Fetcher(self.source, self.arena, policy, clock, self.stats)
        self.cache = NodeCache(root, None, clock, patience_s=patience_s)
        self.cache.allow(budget_bytes)
        self.cache.use("", self.object_id)
        cached = CachedFetch(self.cache, self.fetcher.fetch, self.arena, threads, clock)
        self.fetch = cached.fetch
        self._directory = directory_of(root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cache.close()
        assert self.cache.join(30)
        self.fetcher.close()
        if error is None:
            assert self.arena.leased_count == 0
            assert self.source.receivers_open == 0
        self.arena.close()

    def chunks(self, step_bytes: int = CHUNK_BYTES, start: int = 0) -> list[Chunk]:
        whole = ByteRange(start, SIZE_BYTES)
        return [Chunk(self.object_id, r, r.size_bytes) for r in whole.pieces(step_bytes)]

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Fetch; each chunk comes once, with the right bytes."""
        left = {id(chunk) for chunk in chunks}
        for filled in self.fetch(chunks):
            left.remove(id(filled.chunk))
            byte_range = filled.chunk.byte_range
            assert bytes(filled.data) == DATA[byte_range.start : byte_range.end]
            filled.release()
        assert not left

    def asked(self) -> list[ByteRange]:
        """What the source was asked for, in order of places."""
        return sorted(request.byte_range for request in self.source.requests)


def hold(root: Path, ranges: Sequence[ByteRange]) -> Path:
    """Have the cache hold these ranges; its data file."""
    directory_of(root).mkdir(mode=0o700, exist_ok=True)
    object_id = ScriptedSource({"a": DATA}).object_id("a")
    entry = Entry(directory_of(root), Identity("", object_id), writable=True)
    assert entry.open(create=True)
    for byte_range in ranges:
        entry.write(byte_range, memoryview(DATA)[byte_range.start : byte_range.end])
    entry.close()
    return entry.path(".data")
