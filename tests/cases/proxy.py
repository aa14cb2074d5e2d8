"""A CONNECT proxy that may lead every name to one loopback port, as a private network does."""

from __future__ import annotations

import contextlib
import socket
import threading

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

__all__ = ["TunnelProxy"]


class TunnelProxy(LoopbackServer):
    """Opens tunnels.

    Attributes:
        seen: method and target of every request.
        leads_to: port of 127.0.0.1 that all tunnels end at; None: where they are asked for.
        refuse_status: refuses every request so.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.seen: list[tuple[str, str]] = []
        self.leads_to: int | None = None
        self.refuse_status: int | None = None

    @property
    def hosts(self) -> set[str]:
        return {target.rpartition(":")[0] for _, target in self.seen}


class _Handler(LoopbackHandler):
    owner: TunnelProxy

    def do_CONNECT(self) -> None:  # noqa: N802
        self.owner.seen.append((self.command, self.path))
        self.close_connection = True
        if self.owner.refuse_status is not None:
            self.send_error(self.owner.refuse_status)
            return
        host, _, port = self.path.rpartition(":")
        address = (host, int(port))
        if self.owner.leads_to is not None:
            address = ("127.0.0.1", self.owner.leads_to)
        with socket.create_connection(address) as upstream:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pump, args=(upstream, self.connection))
            back.start()
            _pump(self.connection, upstream)
            back.join()

    def do_GET(self) -> None:  # noqa: N802
        self.owner.seen.append((self.command, self.path))
        self.send_error(502)

    do_HEAD = do_PUT = do_GET  # noqa: N815


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
    finally:
        for end in (sink, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
