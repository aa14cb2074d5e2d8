"""Small requests to registries and token services, over connections that are kept. One attempt."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastload_common import __version__
from fastload_common.errors import SourceError
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import ERROR_BODY_LIMIT_BYTES, Endpoint, ReplyHead
from fastload_common.source.retries import SmallCalls

__all__ = ["HttpCaller", "Reply", "common_headers"]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. The body may hold a secret and is not shown."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def common_headers(endpoint: Endpoint) -> dict[str, str]:
    """What every request carries."""
    return {
        "Host": endpoint.authority,
        "Accept-Encoding": "identity",
        "User-Agent": f"fastload/{__version__}",
    }


class HttpCaller:
    """The small requests of one process. For any thread; not after a fork.

    Args:
        small_calls: timeouts.
        tls: the context for verified connections.
    """

    def __init__(self, small_calls: SmallCalls, tls: Callable[[], ssl.SSLContext]) -> None:
        self._small_calls = small_calls
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: dict[Endpoint, list[HttpConnection]] = {}

    def call(
        self,
        endpoint: Endpoint,
        target: str,
        headers: Mapping[str, str],
        limit_bytes: int,
        form: bytes = b"",
    ) -> Reply:
        """One attempt; a reply with any status.

        Args:
            target: path and query; may hold a signature and is never shown.
            headers: besides the common ones.
            limit_bytes: of a success's body.
            form: makes it a POST.

        Raises:
            SourceError: no reply, or a success that is too large.
        """
        connection = self._take(endpoint)
        sent = common_headers(endpoint) | dict(headers)
        if form:
            sent["Content-Type"] = "application/x-www-form-urlencoded"
            sent["Content-Length"] = str(len(form))
        try:
            head = connection.get(target, sent, form)
            is_success = 200 <= head.status < 300
            limit_bytes = limit_bytes if is_success else ERROR_BODY_LIMIT_BYTES
            body = _body(connection, head, limit_bytes, is_success)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(endpoint, []).append(connection)
        return Reply(head.status, head.headers, body)

    def close(self) -> None:
        """Close the connections; later calls open new ones."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _take(self, endpoint: Endpoint) -> HttpConnection:
        with self._lock:
            kept = self._idle.get(endpoint)
            if kept:
                return kept.pop()
        tls = self._tls() if endpoint.tls else None
        return HttpConnection(
            endpoint, tls, *self._small_calls.timeouts_s(), self._small_calls.clock
        )


def _body(connection: HttpConnection, head: ReplyHead, limit_bytes: int, is_success: bool) -> bytes:
    length = head.content_length
    if not is_success:
        return connection.body_capped(head, limit_bytes)
    if length is None:
        body = connection.body_capped(head, limit_bytes + 1)
        length = len(body)
        if length <= limit_bytes:
            return body
    if length > limit_bytes:
        raise SourceError(
            f"the reply is too large: {length} bytes or more, where at most {limit_bytes} can be "
            "meant",
            hint="does the reference name a model or image?",
        )
    data = bytearray(length)
    connection.body_into(head, memoryview(data))
    return bytes(data)
