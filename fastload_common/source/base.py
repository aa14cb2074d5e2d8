"""The one interface to stored objects. Knows URIs and bytes, never tensors.

A source stands for one root: ``s3://bucket/prefix`` or a directory. Keys are relative to
the root, with ``/`` between parts and none in front.

Who calls, and in which order, in a load:

1. `list` once, from the loading thread;
2. `stat` and `read` for headers and small files, from any thread;
3. `open_receiver` once per connection, from the thread or process that will own it;
   `Receiver.receive` many times, one at a time;
4. `close` last; receivers are closed by their owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fastload_common.checksums.algorithms import Checksum
from fastload_common.ranges import ByteRange, ObjectId

__all__ = [
    "ListedObject",
    "ObjectSource",
    "OpensReceivers",
    "Receipt",
    "Receiver",
    "SourceDescription",
]


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One row of a listing: the key relative to the source's root, and the object's state."""

    key: str
    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one successful request cost, for the report.

    Attributes:
        size_bytes: body bytes placed in the buffer.
        first_byte_s: seconds to the reply's head, opening a connection included if that was needed.
        total_s: seconds to the last byte.
        new_connection: whether a connection had to be opened for it.
    """

    size_bytes: int
    first_byte_s: float
    total_s: float
    new_connection: bool


@dataclass(frozen=True, slots=True)
class SourceDescription:
    """What `fastload doctor` prints and the log says once; holds no secret."""

    kind: str
    root: str
    facts: dict[str, str] = field(default_factory=dict)


@runtime_checkable
class Receiver(Protocol):
    """One connection (or file handle cache), owned by one thread at a time."""

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        """Put exactly the range into the buffer, in one attempt.

        Args:
            object_id: pinned state; a reply from another state is an error, never data.
            byte_range: not empty, inside the object.
            buffer: writable, ``len(buffer) == byte_range.size_bytes``.

        Raises:
            SourceError: a subclass, with ``received_bytes`` set to the good bytes at the
                start of the buffer. ``retryable`` says whether to ask again.
        """
        ...

    def abort(self) -> None:
        """Make a `receive` that runs in another thread fail at once. Safe at any time.

        For good: every later `receive` fails too, so that an abort cannot come too early. Close
        the receiver and open another.
        """
        ...

    def close(self) -> None: ...


class OpensReceivers(Protocol):
    """What the transfer needs of a source."""

    def open_receiver(self) -> Receiver:
        """A new connection; the caller owns it."""
        ...


@runtime_checkable
class ObjectSource(Protocol):
    """Objects below one root."""

    @property
    def root(self) -> str:
        """The root's URI without a slash at its end; safe to print."""
        ...

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        """All objects below the root (only those with no ``/`` in the key unless recursive).

        Sorted by key. "Directories" (keys that end in ``/``) are left out.

        Raises:
            ObjectMissingError: no such bucket or directory.
            AccessDeniedError: not allowed to list; the caller may go on with `stat`.
        """
        ...

    def stat(self, key: str) -> ObjectId:
        """The object's present state.

        Raises:
            ObjectMissingError: no such object.
        """
        ...

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        """Read a small range (or the whole object) with retries.

        Raises:
            SourceError: when retries are used up or the fault is permanent.
        """
        ...

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        """The CRC of the whole object that the store keeps; None where it keeps or tells none.

        Raises:
            ObjectChangedError: the pinned state is gone.
            SourceError: the store did not answer.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create the object unless it exists; True if this call created it. Atomic."""
        ...

    def open_receiver(self) -> Receiver: ...

    def describe(self) -> SourceDescription: ...

    def close(self) -> None: ...
