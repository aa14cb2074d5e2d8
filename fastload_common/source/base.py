"""The one interface to stored objects. Knows URIs and bytes, never tensors.

A source stands for one root: ``s3://bucket/prefix``, an artifact of a registry, or a directory.
Keys are relative to the root, with ``/`` between parts and none in front.

Who calls, and in which order, in a load:

1. `list` once, from the loading thread;
2. `stat` and `read` for headers and small files, from any thread;
3. `RemoteSource.remote_reads`, where other processes receive: `RemoteReads.sign` for each request;
   else `open_receiver` once per connection, from the thread that will own it, and
   `Receiver.receive` many times, one at a time;
4. `close` last; receivers are closed by their owners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fastload_common.checksums.algorithms import Checksum
from fastload_common.errors import SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.http_message import Endpoint
from fastload_common.source.receipt import Receipt

__all__ = [
    "ListedObject",
    "ObjectSource",
    "OpensReceivers",
    "Receipt",
    "Receiver",
    "Refusal",
    "RemoteReads",
    "RemoteSource",
    "SignedRead",
    "SourceDescription",
    "TellsSenders",
]


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One row of a listing: the key relative to the source's root, and the object's state."""

    key: str
    object_id: ObjectId


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


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reply that is no success, as it came. Header names in lower case; the body is capped."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class SignedRead(Protocol):
    """One request for a range that a process without credentials can make, for some minutes.

    The headers, or the path, hold a signature and are never shown.
    """

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def ca_file(self) -> str | None:
        """The certificate authorities to trust; None for plain HTTP."""
        ...

    @property
    def path(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def object_id(self) -> ObjectId:
        """What the reply must be of: the object itself, or the one that it is a part of."""
        ...

    @property
    def byte_range(self) -> ByteRange:
        """Of that object; as large as the range that was asked for."""
        ...

    def judge(self, refusal: Refusal, tried: set[str]) -> SourceError | None:
        """What to do about a refusal: the error, or None: sign anew and ask once more. May block.

        Args:
            tried: what was done about earlier refusals of the same range; grows.
        """
        ...

    def failed(self, error: SourceError, tried: set[str]) -> bool:
        """Take note of a failure that was no refusal; whether to sign anew and ask at once.

        True where the next request goes to somebody else. Does not block. An attempt that was
        ended by who made it is none.
        """
        ...


class RemoteReads(Protocol):
    """Signs requests that others make. For any thread."""

    def sign(self, object_id: ObjectId, byte_range: ByteRange) -> SignedRead:
        """A request for a range of a pinned object, signed with the credentials of this moment.

        May block: to find the endpoint, or to refresh the credentials.

        Raises:
            SourceError, ConfigError: no credentials, or they could not be refreshed.
        """
        ...

    def sign_now(self, object_id: ObjectId, byte_range: ByteRange) -> SignedRead | None:
        """The same without blocking; None where that cannot be promised: then `sign` it.

        Raises:
            SourceError, ConfigError: as `sign`.
        """
        ...


@runtime_checkable
class RemoteSource(Protocol):
    """A source, some of whose objects can be received by another process."""

    def remote_reads(self, object_id: ObjectId) -> RemoteReads | None:
        """What signs requests for this object; None: it can only be read here."""
        ...


@runtime_checkable
class TellsSenders(Protocol):
    """A source whose objects may come from several hosts."""

    def senders(self, object_id: ObjectId) -> str:
        """The hosts that were asked for an object's bytes, for messages; empty: none yet."""
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
