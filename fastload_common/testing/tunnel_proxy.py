"""A proxy on loopback that opens tunnels by CONNECT, or refuses them, and remembers who asked."""

from __future__ import annotations

import contextlib
import socket
import threading

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

__all__ = ["TunnelProxy"]


class TunnelProxy(LoopbackServer):
    """The proxy. Requests that are no CONNECT are answered with ``plain_status``.

    Args:
        wanted: the Proxy-Authorization without which it opens no tunnel (407); None: any.
        plain_status: for requests that ask for an object itself.

    Attributes:
        seen: method and target of every request.
        leads_to: port of 127.0.0.1 that all tunnels end at; None: where they are asked for.
        refuse_status: refuses every CONNECT so.
    """

    def __init__(self, wanted: str | None = None, *, plain_status: int = 502) -> None:
        super().__init__(_Handler)
        self.wanted = wanted
        self.plain_status = plain_status
        self.seen: list[tuple[str, str]] = []
        self.leads_to: int | None = None
        self.refuse_status: int | None = None

    @property
    def tunnels(self) -> list[str]:
        """The targets of all CONNECTs so far."""
        return [target for method, target in self.seen if method == "CONNECT"]

    @property
    def hosts(self) -> set[str]:
        """The hosts of all targets so far."""
        return {target.rpartition(":")[0] for _, target in self.seen}


class _Handler(LoopbackHandler):
    owner: TunnelProxy

    def do_CONNECT(self) -> None:  # noqa: N802
        self.owner.seen.append((self.command, self.path))
        self.close_connection = True
        wanted = self.owner.wanted
        if wanted is not None and self.headers.get("Proxy-Authorization") != wanted:
            self.send_error(407)
            return
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
        self.send_error(self.owner.plain_status)

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
