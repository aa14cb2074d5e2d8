"""A proxy in front of the real S3 server that damages bodies and lies about checksums."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/\d+")
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True)
class Seen:
    """A request that was forwarded."""

    method: str
    path: str
    size_bytes: int


class LyingProxy(LoopbackServer):
    """Forwards everything to one upstream endpoint.

    Attributes:
        flips: end of a path -> (offset of a byte whose lowest bit is flipped, from which reply
            that holds it on).
        heads: put over the headers of replies to requests for checksums; None removes one.
        refuses: status of those replies instead.
        requests: all so far.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__(_Handler)
        self.upstream = urlsplit(upstream).netloc
        self.flips: dict[str, tuple[int, int]] = {}
        self.heads: dict[str, str | None] = {}
        self.refuses: int | None = None
        self.requests: list[Seen] = []
        self._held: dict[str, int] = {}

    def body_bytes(self, name: str) -> int:
        return sum(r.size_bytes for r in self.requests if r.path.endswith(name))

    def asked_for_checksums(self) -> int:
        return sum(r.method == "HEAD" for r in self.requests)

    def damaged(self, path: str, body: bytes, content_range: str) -> bytes:
        """For the handler: the body of a reply with a range."""
        match = _CONTENT_RANGE.fullmatch(content_range)
        start = int(match.group(1)) if match else 0
        for name, (offset, first) in self.flips.items():
            if path.endswith(name) and start <= offset < start + len(body):
                self._held[name] = self._held.get(name, 0) + 1
                if self._held[name] > first:
                    at = offset - start
                    body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        return body


class _Handler(LoopbackHandler):
    owner: LyingProxy

    def do_GET(self) -> None:  # noqa: N802
        owner = self.owner
        path = unquote(urlsplit(self.path).path)
        upstream = http.client.HTTPConnection(owner.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders()
            reply = upstream.getresponse()
            body = reply.read()
            headers = {name.lower(): value for name, value in reply.getheaders()}
        finally:
            upstream.close()
        length = headers.get("content-length", "0") if self.command == "HEAD" else str(len(body))
        status = reply.status
        if self.command == "GET" and status == 206:
            body = owner.damaged(path, body, headers["content-range"])
        if self.headers.get("x-amz-checksum-mode"):
            status = owner.refuses or status
            changed = {**headers, **owner.heads}
            headers = {name: value for name, value in changed.items() if value is not None}
        owner.requests.append(Seen(self.command, path, len(body)))
        self.send_response_only(status)
        for name, value in headers.items():
            if name not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815
