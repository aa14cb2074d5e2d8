"""A source whose small reads (indices and headers) come from the cache where they can."""

from __future__ import annotations

from fastload_common.range_cache.node_cache import NodeCache
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.borrowed import BorrowedSource

__all__ = ["CachedReads"]


class CachedReads(BorrowedSource):
    """What is read through it is used by the cache.

    Args:
        source: is asked for what objects there are, always, and for what is not held.
        cache: stays the caller's.
    """

    def __init__(self, source: ObjectSource, cache: NodeCache) -> None:
        super().__init__(source)
        self._cache = cache
        self._scope = source.describe().facts.get("endpoint", "")

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        byte_range = byte_range or ByteRange(0, object_id.size_bytes)
        self._cache.use(self._scope, object_id)
        if byte_range.size_bytes:
            data = self._cache.read(object_id, byte_range)
            if data is not None:
                return data
        data = super().read(object_id, byte_range)
        if data:
            part = (byte_range, memoryview(data))
            self._cache.keep(object_id, [part], len(data), _nothing)
        return data


def _nothing() -> None:
    """The bytes are nobody else's."""
