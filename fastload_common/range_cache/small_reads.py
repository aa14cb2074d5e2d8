"""A source whose small reads (indices and headers) come from the cache where they can."""

from __future__ import annotations

from collections.abc import Sequence

from fastload_common.checksums.algorithms import Checksum
from fastload_common.range_cache.node_cache import NodeCache
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, ObjectSource, Receiver, SourceDescription

__all__ = ["CachedReads"]


class CachedReads:
    """An `ObjectSource` that is another one. What is read through it is used by the cache.

    Args:
        source: is asked for what objects there are, always, and for what is not held.
        cache: stays the caller's.
    """

    def __init__(self, source: ObjectSource, cache: NodeCache) -> None:
        self._source = source
        self._cache = cache
        self._scope = source.describe().facts.get("endpoint", "")

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        byte_range = byte_range or ByteRange(0, object_id.size_bytes)
        self._cache.use(self._scope, object_id)
        if byte_range.size_bytes:
            data = self._cache.read(object_id, byte_range)
            if data is not None:
                return data
        data = self._source.read(object_id, byte_range)
        if data:
            part = (byte_range, memoryview(data))
            self._cache.keep(object_id, [part], len(data), _nothing)
        return data

    @property
    def root(self) -> str:
        return self._source.root

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        return self._source.list(recursive=recursive)

    def stat(self, key: str) -> ObjectId:
        return self._source.stat(key)

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        return self._source.stored_checksum(object_id)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._source.put_if_absent(key, data)

    def open_receiver(self) -> Receiver:
        return self._source.open_receiver()

    def describe(self) -> SourceDescription:
        return self._source.describe()

    def close(self) -> None:
        """The source is its owner's."""


def _nothing() -> None:
    """The bytes are nobody else's."""
