"""A proxy that opens tunnels and wants credentials."""

from __future__ import annotations

import contextlib
import socket
import threading

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

__all__ = ["TunnelProxy"]


class TunnelProxy(LoopbackServer):
    """Attributes: ``wanted`` Proxy-Authorization, and the ``tunnels`` that were asked for."""

    def __init__(self, wanted: str) -> None:
        super().__init__(_Handler)
        self.wanted = wanted
        self.tunnels: list[str] = []


class _Handler(LoopbackHandler):
    owner: TunnelProxy

    def do_CONNECT(self) -> None:  # noqa: N802
        self.owner.tunnels.append(self.path)
        if self.headers.get("Proxy-Authorization") != self.owner.wanted:
            self.send_error(407)
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as upstream:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            back = threading.Thread(target=_pump, args=(upstream, self.connection))
            back.start()
            _pump(self.connection, upstream)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
    finally:
        for end in (sink, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
