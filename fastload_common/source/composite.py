"""Several sources behind one reader, for a load whose objects lie under several roots.

Knows which root an object URI is under, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import (
    ObjectSource,
    Receipt,
    Receiver,
    RemoteReads,
    RemoteSource,
)

__all__ = ["CompositeReceiver", "CompositeSource"]


class CompositeSource:
    """Reads through whichever source has the longest root above the object's URI.

    Does not own the sources: `close` closes none of them, their owners do.
    """

    def __init__(self, sources: Iterable[ObjectSource]) -> None:
        # Longest first, so that a root inside another one wins.
        self._sources = sorted(sources, key=lambda source: len(source.root), reverse=True)

    def source_of(self, object_id: ObjectId) -> ObjectSource:
        """The source that this object is read through.

        Raises:
            ValueError: the object is under none of the roots.
        """
        for source in self._sources:
            if object_id.uri.startswith(source.root + "/"):
                return source
        roots = ", ".join(source.root for source in self._sources)
        raise ValueError(f"{object_id.uri} is under none of: {roots}")

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        """See `ObjectSource.read`."""
        return self.source_of(object_id).read(object_id, byte_range)

    def open_receiver(self) -> Receiver:
        """A receiver for the objects of all sources; the caller owns it."""
        return CompositeReceiver(self)

    def remote_reads(self, object_id: ObjectId) -> RemoteReads | None:
        """See `RemoteSource.remote_reads`."""
        source = self.source_of(object_id)
        return source.remote_reads(object_id) if isinstance(source, RemoteSource) else None

    def close(self) -> None:
        """Nothing is owned."""


class CompositeReceiver:
    """Opens one receiver for each source when it is first needed."""

    def __init__(self, composite: CompositeSource) -> None:
        self._composite = composite
        self._receivers: dict[str, Receiver] = {}
        self._aborted = False

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        """See `Receiver.receive`."""
        source = self._composite.source_of(object_id)
        receiver = self._receivers.get(source.root)
        if receiver is None:
            receiver = self._receivers[source.root] = source.open_receiver()
            # An abort that came while this one was made did not see it.
            if self._aborted:
                receiver.abort()
        return receiver.receive(object_id, byte_range, buffer)

    def abort(self) -> None:
        """See `Receiver.abort`."""
        self._aborted = True
        for receiver in tuple(self._receivers.values()):
            receiver.abort()

    def close(self) -> None:
        while self._receivers:
            self._receivers.popitem()[1].close()
