"""Binary frames over a Unix socket, with file descriptors beside them. Only the standard library.

A frame is a kind, a length and so many bytes. Both sides are processes of one host and of one
version of this package, so the numbers are in the machine's own order.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque

__all__ = ["Frame", "Inbox", "Outbox"]

Frame = tuple[int, bytes]
"""Kind and payload."""

_HEAD = struct.Struct("=BI")
_RECEIVE_BYTES = 256 * 1024
_INT = struct.Struct("=i")
_RIGHTS_BYTES = socket.CMSG_SPACE(4 * _INT.size)
# Larger than the needs of any model; a length beyond it is no length.
_MOST_BYTES = 1 << 30


class _Piece:
    """Bytes that go out together, with a descriptor at their first byte or without."""

    __slots__ = ("data", "fd")

    def __init__(self, data: bytes, fd: int | None) -> None:
        self.data = bytearray(data)
        self.fd = fd


class Outbox:
    """Frames on their way out. For any thread; never blocks."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._lock = threading.Lock()
        self._pieces: deque[_Piece] = deque()
        self._broken = False

    @property
    def is_empty(self) -> bool:
        return not self._pieces

    def send(self, kind: int, payload: bytes = b"", fd: int | None = None) -> bool:
        """Queue a frame and send what the socket takes now; whether that was all.

        Args:
            fd: a descriptor for the other side; it is duplicated here, and stays the caller's.
        """
        frame = _HEAD.pack(kind, len(payload)) + payload
        own = None if fd is None else os.dup(fd)
        with self._lock:
            last = self._pieces[-1] if self._pieces else None
            if last is None or own is not None:
                self._pieces.append(_Piece(frame, own))
            else:
                last.data += frame
            return self._flush()

    def flush(self) -> bool:
        """Send what the socket takes now; whether that was all.

        To a peer that has gone nothing is sent, and that is no error: what it said last, and
        its end, are seen by whoever reads.
        """
        with self._lock:
            return self._flush()

    def close(self) -> None:
        """Drop what was not sent."""
        with self._lock:
            self._broken = True
            self._drop()

    def _flush(self) -> bool:
        if self._broken:
            self._drop()
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while self._pieces:
            piece = self._pieces[0]
            try:
                if piece.fd is None:
                    sent = self._peer.send(piece.data, flags)
                else:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(piece.fd))
                    sent = self._peer.sendmsg([piece.data], [rights], flags)
            except BlockingIOError:
                return False
            except OSError:
                self._broken = True
                self._drop()
                return True
            if piece.fd is not None:
                os.close(piece.fd)
                piece.fd = None
            del piece.data[:sent]
            if not piece.data:
                self._pieces.popleft()
        return True

    def _drop(self) -> None:
        while self._pieces:
            piece = self._pieces.popleft()
            if piece.fd is not None:
                os.close(piece.fd)


class Inbox:
    """Frames that come in. For one thread.

    Attributes:
        fds: descriptors that came and were not taken; this inbox's own until they are.
    """

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._buffer = bytearray()
        self.fds: deque[int] = deque()

    def receive(self) -> list[Frame] | None:
        """What has come, by one call of the system; None: the other side has gone.

        Raises:
            ValueError: what came is no frame.
        """
        # Not by `socket.recv_fds`, which forgets the flags in Python 3.11.
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, rights, _, _ = self._peer.recvmsg(_RECEIVE_BYTES, _RIGHTS_BYTES, flags)
        except BlockingIOError:
            return []
        except OSError:
            return None
        for level, kind, content in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _INT.size
                self.fds.extend(fd for (fd,) in _INT.iter_unpack(content[:whole]))
        return self.take(data) if data else None

    def take(self, data: bytes) -> list[Frame]:
        """The frames that are complete with this.

        Raises:
            ValueError: see `receive`.
        """
        self._buffer += data
        frames: list[Frame] = []
        position = 0
        while len(self._buffer) - position >= _HEAD.size:
            kind, size_bytes = _HEAD.unpack_from(self._buffer, position)
            if size_bytes > _MOST_BYTES:
                raise ValueError(f"a frame of {size_bytes} bytes")
            end = position + _HEAD.size + size_bytes
            if end > len(self._buffer):
                break
            frames.append((kind, bytes(self._buffer[position + _HEAD.size : end])))
            position = end
        del self._buffer[:position]
        return frames

    def close(self) -> None:
        """Close the descriptors that nobody took."""
        while self.fds:
            os.close(self.fds.popleft())
