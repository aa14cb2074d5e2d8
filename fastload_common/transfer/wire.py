"""What this process and its receiver processes say to each other, over a Unix socket.

Messages are JSON lists behind a length; nothing is unpickled. Both sides are the same version: a
receiver runs the very files that its parent was loaded from. Only the standard library, and errors.

    parent: ["hello", {...}] with the staging memory's descriptor, ["limit", connections],
            ["get", {...}] (see `Get`), ["cancel", id]
    child:  ["ready"], ["alive"] (where there is work, and nothing else to say for a second),
            ["started", id, at_s], ["progress", at_s, [[id, bytes, first_byte_s], ...]],
            ["done", id, at_s, bytes, first_byte_s, total_s, new_connection],
            ["failed", id, at_s, error, new_connection], ["crashed", text],
            ["refused", id, at_s, status, headers, body]
"""

from __future__ import annotations

import functools
import json
import socket
import struct
import threading
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastload_common import errors
from fastload_common.errors import FastloadError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.http_message import Endpoint, Proxy

__all__ = ["Get", "Inbox", "Message", "Outbox", "error_from", "error_record"]

Message = list[Any]

_LENGTH = struct.Struct("!I")
# Made once: `json.dumps` makes one for each call that wants anything but its defaults.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_decode = json.JSONDecoder().decode  # `json.loads` first guesses the encoding
# A number: joining members of an enumeration takes longer than the call that they are for.
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_BYTES = 256 * 1024


class Outbox:
    """Messages on their way out. For any thread; never blocks."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._buffer = bytearray()

    @property
    def is_empty(self) -> bool:
        return not self._buffer

    def add(self, *messages: Message) -> None:
        """Queue messages, in order; `flush` sends them."""
        frames = []
        for message in messages:
            body = _encode(message).encode()
            frames += [_LENGTH.pack(len(body)), body]
        with self._lock:
            self._buffer += b"".join(frames)

    def flush(self, fds: list[int] | None = None) -> bool:
        """Send what the socket takes now; whether that was all.

        Args:
            fds: descriptors that go with the first message of all.

        Raises:
            OSError: the other side has gone.
        """
        with self._lock:
            while self._buffer:
                try:
                    if fds:
                        # Python 3.11's `socket.send_fds` forgets its flags.
                        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
                        sent = self._peer.sendmsg([self._buffer], [rights], _SEND_FLAGS)
                    else:
                        sent = self._peer.send(self._buffer, _SEND_FLAGS)
                except BlockingIOError:
                    return False
                fds = None
                del self._buffer[:sent]
            return True


class Inbox:
    """Messages that come in. For one thread."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, peer: socket.socket) -> list[Message] | None:
        """What has come, by one call of the system; None: the other side has gone."""
        try:
            data = peer.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.take(data) if data else None

    def take(self, data: bytes) -> list[Message]:
        """The messages that are complete with this."""
        self._buffer += data
        messages = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (size_bytes,) = _LENGTH.unpack_from(self._buffer, position)
            end = position + _LENGTH.size + size_bytes
            if end > len(self._buffer):
                break
            messages.append(_decode(self._buffer[position + _LENGTH.size : end].decode()))
            position = end
        del self._buffer[:position]
        return messages


@dataclass(slots=True)
class Get:
    """One attempt, as a receiver process is told of it.

    Attributes:
        object_id, byte_range: what the reply must be of; an attempt for a part of another object is
            told of that one.
        position_bytes: where its bytes go in the staging memory.
        path, headers: either may hold a signature; never shown, and dropped when the request has
            been made.
        fresh: must not use a kept connection.
        urgent: goes before what waits.
    """

    id: int
    object_id: ObjectId
    byte_range: ByteRange
    position_bytes: int
    endpoint: Endpoint
    ca_file: str | None
    path: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    fresh: bool
    urgent: bool

    def message(self) -> Message:
        end = self.endpoint
        through = end.proxy
        proxy = [through.host, through.port, through.authorization] if through else []
        fields = {
            "id": self.id,
            "object": [self.object_id.uri, self.object_id.etag, self.object_id.size_bytes],
            "range": [self.byte_range.start, self.byte_range.end],
            "position": self.position_bytes,
            "endpoint": [end.host, end.port, end.tls, *proxy],
            "ca": self.ca_file,
            "path": self.path,
            "headers": dict(self.headers),
            "fresh": self.fresh,
            "urgent": self.urgent,
        }
        return ["get", fields]

    @classmethod
    def from_message(cls, fields: dict[str, Any]) -> Get:
        return cls(
            id=fields["id"],
            object_id=ObjectId(*fields["object"]),
            byte_range=ByteRange(*fields["range"]),
            position_bytes=fields["position"],
            endpoint=_endpoint(*fields["endpoint"]),
            ca_file=fields["ca"],
            path=fields["path"],
            headers=fields["headers"],
            fresh=fields["fresh"],
            urgent=fields["urgent"],
        )


@functools.lru_cache(maxsize=16)
def _endpoint(host: str, port: int, tls: bool, *proxy: Any) -> Endpoint:
    return Endpoint(host, port, tls, Proxy(*proxy) if proxy else None)


def error_record(error: FastloadError) -> list[Any]:
    """An error as it travels."""
    received_bytes = getattr(error, "received_bytes", 0)
    return [type(error).__name__, error.what, error.hint, error.fields, received_bytes]


def error_from(record: list[Any]) -> FastloadError:
    """The error that an `error_record` stands for."""
    name, what, hint, fields, received_bytes = record
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, FastloadError)):
        kind = SourceError
    error: FastloadError = kind(what, hint=hint, **fields)
    if isinstance(error, SourceError):
        error.received_bytes = int(received_bytes)
    return error
