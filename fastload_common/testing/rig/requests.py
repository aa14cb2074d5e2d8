"""Reading a request: its head, its body in whatever framing, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from urllib.parse import parse_qsl, unquote

from fastload_common.ranges import ByteRange

__all__ = ["Asked", "parse_range", "read_body", "read_head"]

_MAX_HEAD_LINES = 200
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request's head. Header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    def place(self, domains: Iterable[str]) -> tuple[str, str]:
        """Bucket and key; either may be empty.

        Args:
            domains: where ``bucket.domain`` in the Host header names the bucket.
        """
        path = unquote(self.target.partition("?")[0]).removeprefix("/")
        host = re.sub(r":\d+$", "", self.headers.get("host", "")).lower()
        for domain in domains:
            if host.endswith(f".{domain}"):
                return host.removesuffix(f".{domain}"), path
        bucket, _, key = path.partition("/")
        return bucket, key

    @property
    def keep_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


def read_head(stream: BufferedIOBase) -> Asked | None:
    """The next request's head; None where the client has no more, or sends no HTTP."""
    first = stream.readline(65536).decode("latin-1").rstrip("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.rpartition(" ")
    if not method or not version.startswith("HTTP/1."):
        return None
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEAD_LINES):
        line = stream.readline(65536).decode("latin-1")
        if line in ("\r\n", "\n"):
            return Asked(method, target, headers)
        name, colon, value = line.partition(":")
        if not colon:
            return None
        name = name.lower()
        headers[name] = f"{headers[name]},{value.strip()}" if name in headers else value.strip()
    return None


def read_body(stream: BufferedIOBase, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """The body without its framing, and trailing headers."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        raw, trailer = _read_chunks(stream)
    else:
        raw, trailer = stream.read(int(headers.get("content-length", 0))), {}
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING-"):
        return _without_aws_chunks(raw)
    return raw, trailer


def _read_chunks(stream: BufferedIOBase) -> tuple[bytes, dict[str, str]]:
    parts = []
    while size := int(stream.readline(65536).split(b";")[0], 16):
        parts.append(stream.read(size))
        stream.readline(3)
    trailer = {}
    while (line := stream.readline(65536)) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        trailer[name.lower()] = value.strip()
    return b"".join(parts), trailer


def _without_aws_chunks(raw: bytes) -> tuple[bytes, dict[str, str]]:
    """SDKs wrap a body in chunks of their own, to sign each or to append a checksum."""
    parts, at = [], 0
    while True:
        end = raw.index(b"\r\n", at)
        size = int(raw[at:end].split(b";")[0], 16)
        at = end + 2
        if not size:
            break
        parts.append(raw[at : at + size])
        at += size + 2
    trailer = {}
    for line in raw[at:].decode("latin-1").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            trailer[name.lower()] = value.strip()
    return b"".join(parts), trailer


def parse_range(text: str | None, size_bytes: int) -> ByteRange | None:
    """What a Range header asks of an object of this size; None: nothing that it has.

    Without a header, and with one that is not understood (several ranges), the whole object.
    """
    match = _RANGE.fullmatch(text or "")
    if match is None or match.group(1) == match.group(2) == "":
        return ByteRange(0, size_bytes)
    first, last = match.groups()
    if first == "":
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start = int(first)
        end = min(int(last) + 1, size_bytes) if last else size_bytes
    return ByteRange(start, end) if start < end else None
