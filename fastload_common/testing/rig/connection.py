"""One client connection of the rig: reads requests, sends replies, harms their bodies."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastload_common.testing.loopback import LoopbackHandler
from fastload_common.testing.rig import log as ended
from fastload_common.testing.rig.effects import Garbage, Reset, Stall
from fastload_common.testing.rig.faults import Plan
from fastload_common.testing.rig.log import LoggedRequest
from fastload_common.testing.rig.pace import Pace
from fastload_common.testing.rig.replies import Reply
from fastload_common.testing.rig.requests import Asked, read_body, read_head

if TYPE_CHECKING:
    from fastload_common.testing.rig.server import Rig

__all__ = ["RigConnection"]

# One call to the kernel each; TLS makes records of 16 KiB of it.
_PIECE_BYTES = 512 * 1024
_TLS_PIECE_BYTES = 256 * 1024
# Small enough that two connections at a limit take turns.
_PACED_PIECE_BYTES = 128 * 1024
_PACED_PIECE_S = 0.01
# What the kernel holds of a reply that its client no longer wants.
_SEND_BUFFER_BYTES = 256 * 1024
_FOR_EVER_S = 1e6
_DRAIN_POLLS = 2000


class _GoneError(Exception):
    """The client hung up, or the rig stops."""


class RigConnection(LoopbackHandler):
    """Lives in its own thread, from the connection's start to its end."""

    owner: Rig

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        super().setup()
        self.descriptor = self.connection.fileno()
        # Set when a wait must end; why stands in the flags.
        self.wake = threading.Event()
        self.gone = False
        self.stalling = False
        self._released = False
        self._farewell = True
        self.number = self.owner.attach(self)

    def handle(self) -> None:
        try:
            with contextlib.suppress(OSError, _GoneError):
                while self._serve_one():
                    pass
        except Exception as error:  # noqa: BLE001  (shown to the test when the rig stops)
            self.owner.crashes.append(error)

    def finish(self) -> None:
        if self._farewell and isinstance(self.connection, ssl.SSLSocket):
            # Ours is sent; the client's is not waited for.
            with contextlib.suppress(OSError, ValueError):
                self.connection.settimeout(0)
                self.connection.unwrap()
        self.owner.detach(self)
        super().finish()

    def hang_up(self) -> None:
        """The client has closed, or the rig stops. From another thread."""
        self.gone = True
        self.wake.set()

    def release(self) -> None:
        """End a stall. From another thread."""
        if self.stalling:
            self._released = True
            self.wake.set()

    def _serve_one(self) -> bool:
        """Answer one request; False: the connection is done."""
        asked = read_head(self.rfile)
        if asked is None:
            return False
        if asked.headers.get("expect", "").lower() == "100-continue":
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body, trailer = read_body(self.rfile, asked.headers)
        request = self.owner.begin(asked, self.number)
        how = ended.CRASHED
        try:
            plan, reply = self.owner.answer(request, asked, body, trailer)
            request.faults = tuple(type(effect).__name__ for effect in plan.effects)
            self._farewell = plan.farewell
            how = self._send(request, asked, plan, reply)
        except (OSError, _GoneError):
            how = ended.STOPPED if self.owner.stopping else ended.CLIENT_CLOSED
            raise
        finally:
            self.owner.log.end(request, how)
        good = how in (ended.COMPLETE, ended.REFUSED)
        return good and not reply.closes and asked.keep_alive

    def _send(self, request: LoggedRequest, asked: Asked, plan: Plan, reply: Reply) -> str:
        self._wait(plan.first_byte_s)
        if isinstance(plan.answer, Garbage):
            reply.closes = "server"
            self.connection.sendall(plan.answer.data)
            return ended.CUT
        has_body = asked.method != "HEAD"
        size = reply.part.size_bytes if has_body else 0
        breaks = plan.breaks(size)
        head = reply.head(request.number, self.owner.clock.wall_s())
        how = ended.REFUSED if reply.status >= 300 else ended.COMPLETE
        body = _Sender(self, request, reply, plan)
        at = -1
        for offset, harm in breaks:
            if at < 0 <= offset:
                self._send_head(request, reply, head)
                at = 0
            body.send(at, offset)
            at = offset
            if isinstance(harm, Stall):
                self._stall(request, harm)
            elif isinstance(harm, Reset):
                self._reset()
                return ended.RESET
            else:
                return ended.CUT
        # A client that has the last byte finds its request in the log as it ended.
        early = how if reply.closes != "client" else None
        if at < 0:
            if not size and early is not None:
                self.owner.log.end(request, early)
            self._send_head(request, reply, head)
            at = 0
        if at < size:
            body.send(at, size - 1)
            body.send(size - 1, size, ends=early)
        if has_body:
            body.end()
        if reply.closes == "client":
            self._wait(_FOR_EVER_S)
        return how

    def _send_head(self, request: LoggedRequest, reply: Reply, head: bytes) -> None:
        request.status = reply.status
        self.connection.sendall(head)

    def _wait(self, seconds: float) -> None:
        if seconds > 0 and self.owner.clock.wait(self.wake, seconds):
            raise _GoneError

    def wait_until(self, due_s: float) -> None:
        """For a sender at a limit."""
        self._wait(due_s - self.owner.clock.monotonic_s())

    def _stall(self, request: LoggedRequest, harm: Stall) -> None:
        seconds = _FOR_EVER_S if harm.seconds is None else harm.seconds
        self._released = False
        self.stalling = True
        self.owner.log.set_stalled(request, True)
        try:
            self.owner.clock.wait(self.wake, seconds)
        finally:
            self.stalling = False
            self.owner.log.set_stalled(request, False)
        if self._released:
            self.wake.clear()
        if self.gone:
            raise _GoneError

    def _reset(self) -> None:
        """Reset the connection once the client has got what was sent."""
        for _ in range(_DRAIN_POLLS):
            unsent = struct.unpack("i", fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)))
            if unsent[0] == 0 or self.wake.wait(0.001):
                break
        # Closing with a linger time of zero sends a reset. It closes when `finish` lets go.
        self._farewell = False
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()


class _Sender:
    """Sends the body of one reply, at its own pace and within the link's."""

    def __init__(
        self, connection: RigConnection, request: LoggedRequest, reply: Reply, plan: Plan
    ) -> None:
        self._connection = connection
        self._request = request
        self._reply = reply
        self._log = connection.owner.log
        self._clock = connection.owner.clock
        self._link = connection.owner.link
        rate = plan.bytes_per_s
        self._pace = None if rate is None else Pace(rate, self._clock.monotonic_s())
        self._socket = connection.connection
        tls = isinstance(self._socket, ssl.SSLSocket)
        self._piece_bytes = _TLS_PIECE_BYTES if tls else _PIECE_BYTES
        if self._pace is not None or self._link is not None:
            self._piece_bytes = _PACED_PIECE_BYTES
        if rate is not None:
            self._piece_bytes = max(1, min(self._piece_bytes, int(rate * _PACED_PIECE_S)))
        if reply.chunk_bytes is not None:
            self._piece_bytes = min(self._piece_bytes, reply.chunk_bytes)

    def send(self, start: int, end: int, *, ends: str | None = None) -> None:
        """Send the bytes ``[start, end)`` of the body.

        Args:
            ends: how the request ends with them, if it does.
        """
        if start >= end:
            return
        for piece in self._pieces(start, end):
            self._take_turn(len(piece))
            # First the count: who has the bytes may look at the log at once.
            self._log.note(self._request, len(piece))
            if ends is not None:
                self._log.end(self._request, ends)
            at = 0
            try:
                if self._reply.chunk_bytes is not None:
                    self._socket.sendall(b"%x\r\n" % len(piece))
                while at < len(piece):
                    at += self._socket.send(piece[at:])
                if self._reply.chunk_bytes is not None:
                    self._socket.sendall(b"\r\n")
            except OSError:
                self._log.note(self._request, at - len(piece))
                raise

    def end(self) -> None:
        if self._reply.chunk_bytes is not None:
            self._socket.sendall(b"0\r\n\r\n")

    def _pieces(self, start: int, end: int) -> Iterator[memoryview]:
        base = self._reply.part.start
        at = base + start
        for piece in self._reply.content.pieces(at, base + end, self._piece_bytes):
            flip = self._reply.flip_at
            if flip is not None and at <= flip < at + len(piece):
                wrong = bytearray(piece)
                wrong[flip - at] ^= 0xFF
                yield memoryview(wrong)
            else:
                yield piece
            at += len(piece)

    def _take_turn(self, size_bytes: int) -> None:
        for pace in (self._pace, self._link):
            if pace is not None:
                due_s = pace.reserve(size_bytes, self._clock.monotonic_s())
                self._connection.wait_until(due_s)
