"""A threaded HTTP/1.1 server on a free loopback port, which ends cleanly and leaves no socket open.

What `fault_server` and `request_log` have in common.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

__all__ = ["LoopbackHandler", "LoopbackServer"]


class LoopbackHandler(BaseHTTPRequestHandler):
    """Keep-alive, silent, and without Nagle's algorithm."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    @property
    def owner(self) -> Any:
        """The `LoopbackServer` that this handler answers for."""
        return self.server.owner

    def log_message(self, format: str, *args: Any) -> None:
        """The tests read the owner's log instead."""


class LoopbackServer:
    """Serves between `start` and `stop`; a context manager.

    Args:
        handler: answers the requests; finds this object as its ``owner``.
        tls: a server's context, for HTTPS.

    Attributes:
        port: once started.
    """

    def __init__(self, handler: type[LoopbackHandler], tls: ssl.SSLContext | None = None) -> None:
        self._handler = handler
        self._tls = tls
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = _Server(self, self._handler, self._tls)
        self.port = self._server.server_address[1]
        # The poll interval only delays the end.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name=type(self).__name__, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End all connections and wait for their threads. May be called twice."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.end_connections()
        server.server_close()
        if self._thread is not None:
            self._thread.join()

    def drop_connections(self) -> None:
        """End all connections now, as a server does with idle ones."""
        if self._server is not None:
            self._server.end_connections()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 256

    def __init__(
        self, owner: LoopbackServer, handler: type[LoopbackHandler], tls: ssl.SSLContext | None
    ) -> None:
        self.owner = owner
        self._tls = tls
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        if self._tls is not None:
            # The handshake happens at the first read, in the connection's own thread.
            connection = self._tls.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        with self._lock:
            self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news, and half of the tests make it go."""

    def end_connections(self) -> None:
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
