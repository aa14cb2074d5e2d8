"""A fetch of chunks that takes from the cache what it holds, and lets it keep what it does not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable
from typing import Protocol

from fastload_common.clock import Clock
from fastload_common.plan.records import Chunk
from fastload_common.range_cache.node_cache import NodeCache
from fastload_common.range_cache.supply import CacheSupply
from fastload_common.transfer.run import Filled, Staging, Supply

__all__ = ["AnyFilled", "CachedFetch", "FetchWith"]


class AnyFilled(Protocol):
    """A filled chunk, as `Filled`."""

    @property
    def chunk(self) -> Chunk: ...

    @property
    def data(self) -> memoryview: ...

    @property
    def position_bytes(self) -> int: ...

    def release(self) -> None: ...


class FetchWith(Protocol):
    """`Fetcher.fetch`."""

    def __call__(
        self, chunks: Iterable[Chunk], supply: Supply | None = None
    ) -> Generator[Filled, None, None]: ...


class CachedFetch:
    """One load's way to its chunks.

    Args:
        cache: stays the caller's.
        fetch: brings chunks from the source.
        staging: its memory.
        threads: that read from the disk.
        clock: time.
    """

    def __init__(
        self, cache: NodeCache, fetch: FetchWith, staging: Staging, threads: int, clock: Clock
    ) -> None:
        self._cache = cache
        self._fetch_with = fetch
        self._staging = staging
        self._threads = threads
        self._clock = clock

    def fetch(self, chunks: Iterable[Chunk]) -> Generator[AnyFilled, None, None]:
        """See `Fetcher.fetch`."""
        supply = CacheSupply(self._cache, self._staging, self._threads, self._clock)
        return self._watched(self._fetch_with(chunks, supply), supply)

    def _watched(
        self, filling: Generator[Filled, None, None], supply: CacheSupply
    ) -> Generator[AnyFilled, None, None]:
        with contextlib.closing(filling):
            for filled in filling:
                yield self._kept(filled, supply)

    def _kept(self, filled: Filled, supply: CacheSupply) -> AnyFilled:
        """The same chunk, whose memory is held as well until the cache has written it."""
        chunk = filled.chunk
        ranges = supply.source_parts(chunk)
        if not ranges:
            return filled
        first = chunk.byte_range.start
        parts = [(part, filled.data[part.start - first : part.end - first]) for part in ranges]
        shared = _Shared(filled, [data for _, data in parts])
        held_bytes = self._staging.slot_bytes
        if self._cache.keep(chunk.object_id, parts, held_bytes, shared.written):
            return shared
        shared.forget()
        return filled


class _Shared:
    """A filled chunk with two users: whoever places it, and whoever writes it."""

    def __init__(self, filled: Filled, views: list[memoryview]) -> None:
        self.chunk = filled.chunk
        self.data = filled.data[:]
        self._filled = filled
        self._views = views
        self._lock = threading.Lock()
        self._users = 2
        self._released = False

    @property
    def position_bytes(self) -> int:
        return self._filled.position_bytes

    def release(self) -> None:
        """Whoever places it needs it no longer. Safe to call twice."""
        with self._lock:
            again, self._released = self._released, True
        if not again:
            _release([self.data])
            self._leave()

    def written(self) -> None:
        """Whoever writes it needs it no longer."""
        _release(self._views)
        self._leave()

    def forget(self) -> None:
        """It has one user after all, who has the chunk itself."""
        _release([*self._views, self.data])

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._filled.release()


def _release(views: list[memoryview]) -> None:
    for view in views:
        # Turns use after release into an error, except through views made from this one.
        with contextlib.suppress(BufferError):
            view.release()
