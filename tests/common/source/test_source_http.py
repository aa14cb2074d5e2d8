"""The connection against raw bytes: what no well-made server sends."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from fastload_common.clock import SystemClock
from fastload_common.errors import RangeMismatchError, SourceError, SourceUnavailableError
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import Endpoint


class _DrippingClock(SystemClock):
    """Some time passes with each look, and with each look a little more is sent."""

    def __init__(self, drip: bytes, step_s: float) -> None:
        self.server: _RawServer | None = None
        self._drip = drip
        self._step_s = step_s
        self._now_s = 0.0

    def monotonic_s(self) -> float:
        self._now_s += self._step_s
        # All looks come after a request, so the start of a reply is on its way.
        if self.server is not None and self.server.sent.wait(10) and self.server.live is not None:
            with contextlib.suppress(OSError):
                self.server.live.sendall(self._drip)
        return self._now_s


class _RawServer:
    """Replies to each connection's requests with the given pieces, then closes it.

    Each item of ``replies`` is one connection: a list of what is sent after each request.
    """

    def __init__(self, replies: list[list[bytes]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[bytes] = []
        self._replies = replies
        self.live: socket.socket | None = None
        self.sent = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for pieces in self._replies:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.live = connection
            with connection:
                for piece in pieces:
                    request = b""
                    while not request.endswith(b"\r\n\r\n"):
                        try:
                            data = connection.recv(65536)
                        except ConnectionResetError:
                            data = b""
                        if not data:
                            break
                        request += data
                    self.requests.append(request)
                    # The client may have gone, and may be meant to.
                    with contextlib.suppress(OSError):
                        connection.sendall(piece)
                    self.sent.set()

    def stop(self) -> None:
        # Closing alone would not wake the thread out of accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


Serve = Callable[..., tuple[_RawServer, HttpConnection]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[tuple[_RawServer, HttpConnection]] = []

    def start(
        *connections: list[bytes],
        clock: _DrippingClock | None = None,
        read_timeout_s: float = 5.0,
    ) -> tuple[_RawServer, HttpConnection]:
        server = _RawServer(list(connections))
        endpoint = Endpoint("127.0.0.1", server.port, tls=False)
        if clock is not None:
            clock.server = server
        started.append((server, HttpConnection(endpoint, None, 5.0, read_timeout_s, clock)))
        return started[-1]

    yield start
    for server, connection in started:
        connection.close()
        server.stop()


def _get(connection: HttpConnection, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    head = connection.get("/x", {"Host": "h"})
    connection.body_into(head, memoryview(buffer))
    return bytes(buffer)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n0123"


def test_request_and_reply(serve: Serve) -> None:
    server, connection = serve([OK, OK])
    assert _get(connection, 4) == b"0123"
    assert _get(connection, 4) == b"0123"
    assert server.requests == [b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"] * 2


def test_head_in_small_pieces_and_large(serve: Serve) -> None:
    many = b"".join(b"X-Header-%d: %s\r\n" % (i, b"v" * 100) for i in range(200))
    reply = b"HTTP/1.1 200 OK\r\n" + many + b"Content-Length: 4\r\n\r\n0123"
    assert _get(serve([reply])[1], 4) == b"0123"


def test_informational_replies_are_passed_over(serve: Serve) -> None:
    reply = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK
    assert _get(serve([reply])[1], 4) == b"0123"


def test_http_1_0_is_not_kept(serve: Serve) -> None:
    old = OK.replace(b"HTTP/1.1", b"HTTP/1.0")
    _, connection = serve([old], [old])
    assert _get(connection, 4) == b"0123"
    assert _get(connection, 4) == b"0123"


def test_repeated_headers(serve: Serve) -> None:
    same = OK.replace(b"\r\n\r\n", b"\r\nContent-Length: 4\r\nX-A: 1\r\nX-A: 2\r\n\r\n")
    _, connection = serve([same])
    head = connection.get("/x", {})
    assert head.headers["x-a"] == "1, 2"
    assert head.content_length == 4


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46 a TLS alert\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4x\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"4" * 5_000 + b"\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nContent-Length: 4\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n4\r\n0123\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000
        + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n0123",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"",
    ],
)
def test_replies_that_are_not_http(serve: Serve, reply: bytes) -> None:
    _, connection = serve([reply])
    with pytest.raises(SourceUnavailableError) as caught:
        _get(connection, 4)
    assert "http://127.0.0.1:" in str(caught.value)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b"4\r\n0123\r\n0\r\n\r\n",
        b"1\r\n0\r\n3;extension=1\r\n123\r\n0\r\nTrailer: x\r\n\r\n",
        b"01\r\n0\r\nA\r\n123456789a\r\n0\r\n\r\n",
    ],
)
def test_chunked(serve: Serve, body: bytes) -> None:
    _, connection = serve([CHUNKED + body, OK])
    size_bytes = 11 if b"A\r\n" in body else 4
    assert _get(connection, size_bytes) == b"0123456789a"[:size_bytes]
    # The connection is still in step.
    assert _get(connection, 4) == b"0123"


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n0123",
        b"4\r\n0123X\r\n0\r\n\r\n",
        b"\r\n",
        b"4\r\n01",
        b"4\r\n0123\r\n",
        # What Python's int() takes, and HTTP does not have.
        b"2\r\n01\r\n-1\r\n\r\n3\r\n123\r\n0\r\n\r\n",
        b"+4\r\n0123\r\n0\r\n\r\n",
        b"0x4\r\n0123\r\n0\r\n\r\n",
        b"0_4\r\n0123\r\n0\r\n\r\n",
        b" 4\r\n0123\r\n0\r\n\r\n",
        b"4" * 5_000 + b"\r\n0123\r\n0\r\n\r\n",
        b"4\r\n0123\r\n0\r\n" + b"Trailer: x\r\n" * 1_000 + b"\r\n",
    ],
)
def test_damaged_chunks(serve: Serve, body: bytes) -> None:
    with pytest.raises(SourceUnavailableError):
        _get(serve([CHUNKED + body])[1], 4)


def test_chunks_longer_than_wanted(serve: Serve) -> None:
    with pytest.raises(RangeMismatchError):
        _get(serve([CHUNKED + b"5\r\n01234\r\n0\r\n\r\n"])[1], 4)


def test_part_of_a_head_is_no_idle_close(serve: Serve) -> None:
    server, connection = serve([OK, b"HTTP/1.1 2"], [OK])
    assert _get(connection, 4) == b"0123"
    with pytest.raises(SourceUnavailableError):
        _get(connection, 4)
    assert len(server.requests) == 2


def test_bytes_left_over_do_not_reach_the_next_reply(serve: Serve) -> None:
    # A server out of step: more came than the reply, in the same piece or later.
    for more in (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL", b"E" * 10_000):
        server, connection = serve([OK + more, OK], [OK])
        assert _get(connection, 4) == b"0123"
        assert _get(connection, 4) == b"0123"
        # The second request went over a new connection.
        assert [bool(request) for request in server.requests] == [True, False, True]


def test_bytes_that_come_while_idle_do_not_reach_the_next_reply(serve: Serve) -> None:
    server, connection = serve([OK, OK], [OK])
    assert _get(connection, 4) == b"0123"
    assert server.live is not None
    assert connection._socket is not None
    server.live.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL")
    assert select.select([connection._socket], [], [], 10)[0]
    assert _get(connection, 4) == b"0123"
    assert [bool(request) for request in server.requests] == [True, False, True]


@pytest.mark.parametrize("chunked", [False, True])
def test_error_body_is_read_to_a_limit(serve: Serve, chunked: bool) -> None:
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 100000"
    body = (b"186a0\r\n" if chunked else b"") + b"x" * 100_000
    _, connection = serve([b"HTTP/1.1 503 Busy\r\n" + length + b"\r\n\r\n" + body], [OK])
    head = connection.get("/x", {})
    assert connection.body_capped(head, 1_000) == b"x" * 1_000
    assert _get(connection, 4) == b"0123"


def test_error_body_cut_short_is_what_came(serve: Serve) -> None:
    _, connection = serve([b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\n0123"], [OK])
    head = connection.get("/x", {})
    assert connection.body_capped(head, 1_000) == b"0123"
    assert _get(connection, 4) == b"0123"


def test_line_breaks_in_headers_are_refused(serve: Serve) -> None:
    _, connection = serve()
    with pytest.raises(SourceError, match="line break"):
        connection.get("/x", {"If-Match": '"a"\r\nEvil: 1'})


def test_ipv6_authority() -> None:
    assert Endpoint("fd00::1", 9000, tls=True).authority == "[fd00::1]:9000"
    assert str(Endpoint("fd00::1", 443, tls=True)) == "https://[fd00::1]"
    assert str(Endpoint("s3.local", 80, tls=False)) == "http://s3.local"
    assert str(Endpoint("s3.local", 80, tls=True)) == "https://s3.local:80"


@pytest.mark.parametrize(
    ("start", "drip", "timeout_s", "least_received_bytes"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"y", 5.0, 0),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", 5.0, 0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n0", b"1", 1.0, 1),
        (CHUNKED + b"1\r\n0\r\n", b"0", 5.0, 1),
    ],
)
def test_s18_reply_that_trickles_ends(
    serve: Serve, start: bytes, drip: bytes, timeout_s: float, least_received_bytes: int
) -> None:
    # The second piece keeps the connection open: the server waits for another request.
    clock = _DrippingClock(drip, step_s=timeout_s * 0.9)
    _, connection = serve([start, b""], clock=clock, read_timeout_s=timeout_s)
    with pytest.raises(SourceUnavailableError, match="slowly") as caught:
        _get(connection, 999)
    assert caught.value.received_bytes >= least_received_bytes


def test_s18_slow_error_body_is_given_up(serve: Serve) -> None:
    clock = _DrippingClock(b"x", step_s=1.0)
    reply = b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n"
    _, connection = serve([reply, b""], [OK], clock=clock)
    head = connection.get("/x", {})
    assert connection.body_capped(head, 1_000) == b""
    clock.server = None
    assert _get(connection, 4) == b"0123"
