"""The node's cache in a load: opened where it is set, asked first, told what the source brought."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import ChecksumMismatchError
from fastload_common.load.report import LoadReport
from fastload_common.load.request import RankPlace
from fastload_common.load.sizes import LoadSizes
from fastload_common.plan.records import Chunk
from fastload_common.range_cache.fetching import AnyFilled, CachedFetch, FetchWith
from fastload_common.range_cache.node_cache import NodeCache
from fastload_common.range_cache.small_reads import CachedReads
from fastload_common.source.base import ObjectSource
from fastload_common.source.uri import is_file_uri
from fastload_common.staging.arena import Arena

__all__ = ["Caching"]

_MOST_THREADS = 8


class Caching:
    """Of one load of one rank. Without FASTLOAD_NODE_CACHE nothing here does anything.

    Args:
        settings: ``node_cache``, ``node_cache_max_bytes``.
        place: CPUs are divided among the ranks of a host.
        report: its `node_cache` is filled by `close`.
        clock: time.
    """

    def __init__(
        self, settings: Settings, place: RankPlace, report: LoadReport, clock: Clock
    ) -> None:
        self._settings = settings
        self._place = place
        self._report = report
        self._clock = clock
        self._cache: NodeCache | None = None
        self._aside_bytes = 0

    def reads(self, source: ObjectSource) -> ObjectSource:
        """The same source; what is on other machines comes from the cache where it can."""
        root, limit = self._settings.node_cache, self._settings.node_cache_max_bytes
        if root is None or is_file_uri(source.root):
            return source
        if self._cache is None:
            self._cache = NodeCache(root, limit, self._clock)
        return CachedReads(source, self._cache)

    def fetch(
        self, fetch: FetchWith, arena: Arena, sizes: LoadSizes
    ) -> Callable[[Iterable[Chunk]], Generator[AnyFilled, None, None]]:
        """The same fetch, by way of the cache."""
        if self._cache is None:
            return fetch
        self._cache.allow(sizes.behind_slots * sizes.chunk_bytes)
        cpus = len(os.sched_getaffinity(0)) // self._place.local_world_size
        threads = max(1, min(_MOST_THREADS, max(2, cpus), sizes.slots // 4))
        return CachedFetch(self._cache, fetch, arena, threads, self._clock).fetch

    def set_aside(self, read: Callable[[], None]) -> None:
        """Do what reads only to compare; that is in no other number."""
        before = 0 if self._cache is None else self._cache.chunk_bytes
        try:
            read()
        finally:
            if self._cache is not None:
                self._aside_bytes += self._cache.chunk_bytes - before

    def close(self, error: BaseException | None) -> None:
        """Let what is still to be written be written behind; the numbers go into the report.

        Args:
            error: what ended the load. Bytes that the store's checksum does not fit are removed.
        """
        cache = self._cache
        if cache is None:
            return
        if isinstance(error, ChecksumMismatchError):
            cache.discard(str(error.fields.get("uri")))
        report = self._report
        report.node_cache = cache.facts()
        from_cache = cache.chunk_bytes - self._aside_bytes
        report.fetched_bytes = max(0, report.fetched_bytes - from_cache)
        cache.close()
