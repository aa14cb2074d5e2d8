"""A logging HTTP proxy in front of an S3 server: who asked for what, and how many bytes went.

It proves what no client can say of itself: bytes pulled by a node over bytes of the model, peak
concurrency, and that no other host was asked. Clients use its ``endpoint`` as theirs; signatures
stay good, because the Host header goes through unchanged.
"""

from __future__ import annotations

import http.client
import threading
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

__all__ = ["LoggedRequest", "LoggingProxy"]

_PIECE_BYTES = 256 * 1024
_NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request that was answered.

    Attributes:
        path: decoded, without query: ``/bucket/key``.
        range_header: as sent, or None.
        body_bytes: of the reply's body, as far as it was sent to the client.
        signed: whether it had a signature.
    """

    method: str
    path: str
    query: str
    range_header: str | None
    status: int
    body_bytes: int
    signed: bool


class LoggingProxy(LoopbackServer):
    """Forwards everything to one upstream endpoint, and logs it.

    Args:
        upstream: ``http://host:port``.

    Attributes:
        requests: in the order in which they ended.
        peak_concurrency: most requests in progress at one time.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(_Handler)
        url = urlsplit(upstream)
        self.upstream_host = url.hostname or ""
        self.upstream_port = url.port or 80
        self.requests: list[LoggedRequest] = []
        self.peak_concurrency = 0
        self._in_progress = 0
        self._lock = threading.Lock()

    def body_bytes(self, method: str = "GET", below: str = "/") -> int:
        """Bytes of all bodies sent for this method and paths that start with ``below``."""
        with self._lock:
            return sum(
                r.body_bytes
                for r in self.requests
                if r.method == method and r.path.startswith(below)
            )

    def clear(self) -> None:
        """Forget what was logged."""
        with self._lock:
            self.requests.clear()
            self.peak_concurrency = self._in_progress

    def begin(self) -> None:
        """For the handler."""
        with self._lock:
            self._in_progress += 1
            self.peak_concurrency = max(self.peak_concurrency, self._in_progress)

    def end(self, request: LoggedRequest) -> None:
        """For the handler."""
        with self._lock:
            self._in_progress -= 1
            self.requests.append(request)


class _Handler(LoopbackHandler):
    owner: LoggingProxy
    _upstream: http.client.HTTPConnection | None = None

    def do_GET(self) -> None:  # noqa: N802
        self._forward()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    def _forward(self) -> None:
        self.owner.begin()
        status, sent_bytes, last = 0, 0, b""
        try:
            reply = self._ask_upstream()
            status = reply.status
            self._send_head(reply)
            while piece := reply.read(_PIECE_BYTES):
                self.wfile.write(last)
                last = piece
                sent_bytes += len(piece)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            url = urlsplit(self.path)
            logged = LoggedRequest(
                self.command,
                unquote(url.path),
                url.query,
                self.headers.get("Range"),
                status,
                sent_bytes,
                "Authorization" in self.headers or "X-Amz-Signature" in url.query,
            )
            # Before its last bytes: who has them may ask again at once, or look at the log.
            self.owner.end(logged)
        try:
            self.wfile.write(last)
        except OSError:
            self.close_connection = True

    def _ask_upstream(self) -> http.client.HTTPResponse:
        # One upstream connection for each client connection, as without the proxy.
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(
                self.owner.upstream_host, self.owner.upstream_port
            )
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self._request_body()
        self._upstream.putrequest(
            self.command, self.path, skip_host=True, skip_accept_encoding=True
        )
        for name, value in self.headers.items():
            if name.lower() not in _NOT_PASSED_ON | {"expect", "content-length"}:
                self._upstream.putheader(name, value)
        self._upstream.putheader("Content-Length", str(len(body)))
        self._upstream.endheaders(body)
        return self._upstream.getresponse()

    def _request_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline() not in (b"\r\n", b""):
            pass
        return b"".join(parts)

    def _send_head(self, reply: http.client.HTTPResponse) -> None:
        self.send_response_only(reply.status, reply.reason)
        for name, value in reply.getheaders():
            if name.lower() not in _NOT_PASSED_ON:
                self.send_header(name, value)
        if reply.headers.get("Content-Length") is None and self.command != "HEAD":
            # Its length is not known, so its end is the connection's.
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
