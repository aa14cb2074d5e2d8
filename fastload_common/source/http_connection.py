"""One keep-alive HTTP/1.1 connection whose bodies go straight into the caller's memory.

Why not `http.client`: a body is received by `recv_into` with MSG_WAITALL, one system call (and one
hand-over of the interpreter's lock) for megabytes instead of one for whatever has arrived, and the
number of good bytes is exact when it fails. Only the standard library; knows nothing of S3.

Errors: `SourceUnavailableError` for whatever a new attempt may cure, with ``received_bytes``;
plain `SourceError` for a certificate that does not verify. Their fields name the endpoint; the
caller adds the object.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import (
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.source.http_errors import CLOSED, network_error
from fastload_common.source.http_message import (
    Endpoint,
    Proxy,
    ReplyHead,
    parse_chunk_size,
    parse_head,
    serialize_request,
)
from fastload_common.source.http_pace import Pace, Progress
from fastload_common.source.http_socket import addresses, block_with_timeout
from fastload_common.source.http_tunnel import check_tunnel, connect_request

__all__ = ["HttpConnection"]

# Heads larger than this, informational ones included, are no S3 reply (AWS allows 8 KiB).
_HEAD_LIMIT_BYTES = 64 * 1024
# First receive of a reply: a head fits, and little of the body is copied twice.
_HEAD_WINDOW_BYTES = 4 * 1024
_TRAILER_LIMIT = 100
# A plain body comes in slices of about so many seconds.
_SLICE_S = 0.025
_LEAST_SLICE_BYTES = 64 * 1024
_FIRST_SLICE_BYTES = 256 * 1024
_LARGEST_SLICE_BYTES = 8 * 1024 * 1024
# Of TLS, at most 16 KiB each: so many come before the time is looked at.
_RECORDS = 32
_SMALL_BYTES = 4 * 1024  # unless they trickle
# A number: joining members of an enumeration takes longer than the call that they are for.
_PEEK_FLAGS = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)


class HttpConnection:
    """A connection for requests, owned by one thread; only `abort` is for others.

    Args:
        endpoint: fixed for the life of this object.
        tls: the context; needed if ``endpoint.tls``.
        connect_timeout_s: for one address, and again for the TLS handshake.
        read_timeout_s: longest silence, and longest time for a whole head. A body gets so much
            more as it needs at 64 KiB/s. A plain connection notices after once to twice that.
        clock: for the time that a head and a body take.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        read_timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._pace = Pace(clock or SystemClock(), read_timeout_s)
        self._lock = threading.Lock()  # guards _socket and _aborted together
        self._socket: socket.socket | None = None
        self._aborted = False
        self._reusable = False
        # Bytes that came with the head: window[start:end] is what is not consumed yet.
        self._window = bytearray(_HEAD_WINDOW_BYTES)
        self._start = 0
        self._end = 0
        self._progress = Progress()
        self._slice_bytes = _FIRST_SLICE_BYTES

    @property
    def received_bytes(self) -> int:
        """How much of the present body is in the caller's memory. For any thread."""
        return self._progress.received_bytes

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def get(self, target: str, headers: Mapping[str, str], form: bytes = b"") -> ReplyHead:
        """Send a GET (with a form a POST), read the head; the body is next, or `close` called.

        If a kept connection turns out to have been closed by the server before any byte of the
        reply, the request is sent once more on a new one.
        """
        if self._endpoint.proxy is not None and not self._endpoint.tls:
            target = f"{self._endpoint}{target}"
        request = serialize_request("POST" if form else "GET", target, headers) + form
        self._progress = Progress()
        with self._mapped():
            if self._reusable and self._is_idle():
                try:
                    return self._exchange(request, new_connection=False)
                except CLOSED:
                    # Part of a head has arrived: then this is not an idle connection's end.
                    if self._end > 0:
                        raise
            self.close()
            self._connect()
            return self._exchange(request, new_connection=True)

    def body_into(self, head: ReplyHead, view: memoryview) -> None:
        """Receive the whole body, which must be exactly as long as the view.

        Raises:
            SourceUnavailableError: it ended early; ``received_bytes`` says how much is good.
            RangeMismatchError: it is longer.
        """
        progress = self._progress = Progress()
        self._pace.expect(len(view))
        with self._mapped(progress):
            if head.chunked:
                self._chunks_into(view, progress)
            else:
                self._fill(view, progress)
                if head.content_length is None:
                    self._expect_end()
        self._reusable = head.keep_alive

    def body_capped(self, head: ReplyHead, limit_bytes: int) -> bytes:
        """Read an error's body, at most ``limit_bytes``; never raises for a body cut short."""
        length = head.content_length
        self._pace.expect(limit_bytes)
        if length is not None and length <= limit_bytes:
            data = bytearray(length)
            progress = Progress()
            try:
                self._fill(memoryview(data), progress)
            except (OSError, SourceError):
                self.close()
            else:
                self._reusable = head.keep_alive
            return bytes(data[: progress.received_bytes])
        data = bytearray(limit_bytes)
        progress = Progress()
        with contextlib.suppress(OSError, SourceError):
            if head.chunked:
                self._chunks_into(memoryview(data), progress)
            else:
                self._fill(memoryview(data), progress)
        self.close()
        return bytes(data[: progress.received_bytes])

    def abort(self) -> None:
        """Make whatever runs on this connection fail at once; nothing works on it afterwards."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                # Not SSLSocket.shutdown: that one drops the TLS state, and a reader in another
                # thread would then take cipher text for data.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            gone, self._socket = self._socket, None
        self._reusable = False
        self._start = self._end = 0
        if gone is not None:
            with contextlib.suppress(OSError):
                gone.close()

    # Connecting

    def _connect(self) -> None:
        peer = self._endpoint.proxy or self._endpoint
        last: OSError | None = None
        for family, kind, protocol, _, address in addresses(peer.host, peer.port):
            raw = socket.socket(family, kind, protocol)
            raw.settimeout(self._connect_timeout_s)
            self._adopt(raw)
            try:
                raw.connect(address)
                break
            except OSError as error:
                last = error
                self.close()
        else:
            raise last or OSError(f"{peer.host} has no address")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._endpoint.tls:
            block_with_timeout(raw, self._read_timeout_s)
            return
        if self._endpoint.proxy is not None:
            self._tunnel(self._endpoint.proxy)
        assert self._tls is not None
        # Adopted before the handshake, so that an abort reaches it.
        secure = self._tls.wrap_socket(
            raw, server_hostname=self._endpoint.host, do_handshake_on_connect=False
        )
        self._adopt(secure)
        secure.do_handshake()
        secure.settimeout(self._read_timeout_s)

    def _adopt(self, new: socket.socket) -> None:
        with self._lock:
            self._socket = new
            aborted = self._aborted
        if aborted:
            raise ConnectionAbortedError

    def _tunnel(self, proxy: Proxy) -> None:
        request = connect_request(self._endpoint, proxy)
        head = self._exchange(request, new_connection=True)
        self._start = self._end = 0
        check_tunnel(head, self._endpoint, proxy)

    # Reading

    def _exchange(self, request: bytes, *, new_connection: bool) -> ReplyHead:
        self._start = self._end = 0
        self._live().sendall(request)
        self._pace.expect(0)
        while True:
            head = parse_head(self._read_head(), new_connection=new_connection)
            if head.status >= 200:
                return head

    def _is_idle(self) -> bool:
        """Whether a kept connection is open and in step, as far as can be seen without asking."""
        if self._socket is None or self._start != self._end:
            return False
        try:
            if self._endpoint.tls:
                # Not looked at but read: what waits may be a session ticket, and no data.
                self._socket.settimeout(0)
                self._socket.recv(1)
            else:
                self._socket.recv(1, _PEEK_FLAGS)
        except (BlockingIOError, ssl.SSLWantReadError):
            if self._endpoint.tls:
                self._socket.settimeout(self._read_timeout_s)
            return True
        except OSError:
            return False
        # Closed by the server, or it sent more than its reply.
        return False

    def _live(self) -> socket.socket:
        live = self._socket
        if live is None or self._aborted:
            raise ConnectionAbortedError
        return live

    def _read_head(self) -> bytes:
        """Bytes up to the blank line; what follows stays in the window."""
        searched = self._start
        while True:
            end = self._window.find(b"\r\n\r\n", searched, self._end)
            if end >= 0:
                head = bytes(self._window[self._start : end])
                self._start = end + 4
                return head
            searched = max(self._start, self._end - 3)
            if self._end > _HEAD_LIMIT_BYTES:
                raise SourceUnavailableError("the reply's head has no end")
            self._receive_more()

    def _receive_more(self) -> None:
        if len(self._window) - self._end < _HEAD_WINDOW_BYTES // 2:
            self._window.extend(bytes(_HEAD_WINDOW_BYTES))
        self._pace.check()
        with memoryview(self._window)[self._end :] as free:
            count = self._live().recv_into(free)
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        self._end += count

    def _take(self, view: memoryview) -> int:
        """Move window bytes into the view; how many."""
        count = min(len(view), self._end - self._start)
        view[:count] = self._window[self._start : self._start + count]
        self._start += count
        return count

    def _fill(self, view: memoryview, progress: Progress) -> None:
        position = self._take(view)
        progress.received_bytes += position
        live = self._live()
        receive = self._receive_tls if self._endpoint.tls else self._receive_plain
        while position < len(view):
            position += receive(live, view[position:], progress)
            if self._aborted and position < len(view):
                raise ConnectionAbortedError

    def _receive_plain(self, live: socket.socket, view: memoryview, progress: Progress) -> int:
        """A slice, by one call of the system, which waits for all of it."""
        view = view[: self._slice_bytes]
        begun_s = self._pace.check()
        count = live.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        progress.received_bytes += count
        # Few calls on a fast connection: after each, everything else is to be had from memory
        # anew. And on a slow one progress that can be seen.
        took_s = self._pace.elapsed_s(begun_s)
        if took_s > 2 * _SLICE_S:
            self._slice_bytes = max(_LEAST_SLICE_BYTES, self._slice_bytes // 2)
        elif took_s < _SLICE_S / 2 and count == self._slice_bytes:
            self._slice_bytes = min(_LARGEST_SLICE_BYTES, self._slice_bytes * 2)
        return count

    def _receive_tls(self, live: socket.socket, view: memoryview, progress: Progress) -> int:
        """Some records, each by one call."""
        assert isinstance(live, ssl.SSLSocket)
        self._pace.check()
        position, end = 0, len(view)
        for _ in range(_RECORDS):
            # `read`, which `recv_into` calls, too; it takes no more than a record at a time.
            count: Any = live.read(end - position, view[position:])
            if not count:
                raise ConnectionResetError("the connection was closed")
            position += count
            progress.received_bytes += count
            if position == end or count < _SMALL_BYTES or self._aborted:
                break
        return position

    def _expect_end(self) -> None:
        if self._start == self._end and self._live().recv_into(bytearray(1)) == 0:
            return
        raise RangeMismatchError("the body is longer than the range")

    def _line(self) -> bytes:
        while True:
            end = self._window.find(b"\r\n", self._start, self._end)
            if end >= 0:
                line = bytes(self._window[self._start : end])
                self._start = end + 2
                return line
            if self._end - self._start > _HEAD_LIMIT_BYTES:
                raise SourceUnavailableError("the chunked body is damaged")
            if self._start == self._end:
                self._start = self._end = 0
            self._receive_more()

    def _chunks_into(self, view: memoryview, progress: Progress) -> None:
        position = 0
        while True:
            size_bytes = parse_chunk_size(self._line())
            if size_bytes == 0:
                if all(self._line() for _ in range(_TRAILER_LIMIT)):
                    raise SourceUnavailableError("the chunked body's trailers have no end")
                break
            if position + size_bytes > len(view):
                self._fill(view[position:], progress)
                raise RangeMismatchError("the body is longer than the range")
            self._fill(view[position : position + size_bytes], progress)
            position += size_bytes
            if self._line():
                raise SourceUnavailableError("the chunked body is damaged")
        if position < len(view):
            raise SourceUnavailableError("the body is shorter than the range")

    # Errors

    @contextlib.contextmanager
    def _mapped(self, progress: Progress | None = None) -> Iterator[None]:
        """Turn what goes wrong into our errors, and give the connection up."""
        try:
            yield
        except SourceError as error:
            self.close()
            error.fields.setdefault("endpoint", str(self._endpoint))
            # A body that is longer than the range was not the range: none of it is good.
            good = progress if error.retryable else None
            error.received_bytes = good.received_bytes if good else 0
            raise
        except OSError as error:
            timeouts_s = (self._connect_timeout_s, self._read_timeout_s)
            mapped = network_error(error, self._endpoint, timeouts_s, aborted=self._aborted)
            self.close()
            mapped.received_bytes = progress.received_bytes if progress else 0
            raise mapped from error
