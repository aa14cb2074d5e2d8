"""A source that is another one: for whoever adds something to its small reads."""

from __future__ import annotations

from collections.abc import Sequence

from fastload_common.checksums.algorithms import Checksum
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, ObjectSource, Receiver, SourceDescription

__all__ = ["BorrowedSource"]


class BorrowedSource:
    """An `ObjectSource` that asks another one for everything; override what is to differ.

    Args:
        source: stays its owner's: `close` does not close it.
    """

    def __init__(self, source: ObjectSource) -> None:
        self._source = source

    @property
    def root(self) -> str:
        return self._source.root

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        return self._source.list(recursive=recursive)

    def stat(self, key: str) -> ObjectId:
        return self._source.stat(key)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        return self._source.read(object_id, byte_range)

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
