"""HTTP/1.1 messages and where they go: records, request bytes, reply heads. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastload_common.errors import SourceError, SourceUnavailableError

__all__ = [
    "ERROR_BODY_LIMIT_BYTES",
    "Endpoint",
    "Proxy",
    "ReplyHead",
    "parse_chunk_size",
    "parse_head",
    "serialize_request",
]

ERROR_BODY_LIMIT_BYTES = 64 * 1024
"""More of a body that is no success is not looked at."""

_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?", re.DOTALL)
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) (\d{3})(?: .*)?")
_LINE_BREAK = re.compile(r"[\r\n]")


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. ``authorization`` is a Proxy-Authorization value and is never shown."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where connections go. ``host`` has no brackets, also when it is an IPv6 address."""

    host: str
    port: int
    tls: bool
    proxy: Proxy | None = None

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL and in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Status and headers (names in lower case). ``content_length`` is None without one."""

    status: int
    headers: Mapping[str, str]
    content_length: int | None
    chunked: bool
    keep_alive: bool
    new_connection: bool


def serialize_request(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The bytes of a request without a body.

    Raises:
        SourceError: a header holds a line break.
    """
    lines = [
        f"{method} {target} HTTP/1.1",
        *[f"{name}: {value}" for name, value in headers.items()],
    ]
    if _LINE_BREAK.search(" ".join(lines)):
        raise SourceError("a line break in a request's header was refused")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_head(head: bytes, *, new_connection: bool) -> ReplyHead:
    """Parse a reply's head, given without the blank line at its end.

    Raises:
        SourceUnavailableError: it is not one.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise SourceUnavailableError(
            "the reply is not HTTP/1.1", hint="does the endpoint's scheme (http, https) fit?"
        )
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise SourceUnavailableError("the reply has a damaged header")
        if headers.setdefault(name, value) != value:
            if name in ("content-length", "content-range"):
                raise SourceUnavailableError(f"the reply has two different {name} headers")
            headers[name] += ", " + value
    length = headers.get("content-length")
    if length is not None and not _CONTENT_LENGTH.fullmatch(length):
        raise SourceUnavailableError("the reply has an invalid Content-Length")
    encoding = headers.get("transfer-encoding")
    if encoding is not None and encoding.lower() != "chunked":
        raise SourceUnavailableError(
            f"the reply has a Transfer-Encoding that was not asked for: {encoding[:40]!r}",
            hint="a proxy before the endpoint must not encode the store's replies",
        )
    chunked = encoding is not None
    connection = headers.get("connection", "" if match.group(1) == "1" else "close").lower()
    return ReplyHead(
        status=int(match.group(2)),
        headers=headers,
        content_length=None if chunked or length is None else int(length),
        chunked=chunked,
        keep_alive="close" not in connection and (chunked or length is not None),
        new_connection=new_connection,
    )


def parse_chunk_size(line: bytes) -> int:
    """The size in the line before a chunk; extensions do not count.

    Raises:
        SourceUnavailableError: it is not one.
    """
    # Not whatever int() takes: a sign or an underscore would move bytes.
    match = _CHUNK_SIZE.fullmatch(line)
    if match is None:
        raise SourceUnavailableError("the chunked body is damaged")
    return int(match.group(1), 16)
