"""A small S3-like server on loopback that fails exactly as a test tells it to.

For what a real server does not do on demand; everything else is tested against `s3_server`. Faults
are addressed by method, object and attempt; a stall lasts until the test releases it. Bucket
regions, expired keys and unsigned requests are answered as AWS answers them; signatures are not
checked.

    with FaultServer() as server:
        server.put("bucket", "key", data)
        server.script("GET", "bucket/key", [Fault(cut_after_bytes=10)])   # second attempt is good
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from fastload_common.testing.fault_listing import listing_xml
from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer

__all__ = ["Fault", "FaultServer", "SeenRequest"]

_SCOPE = re.compile(r"Credential=([^/]+)/\d{8}/([^/]+)/")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one reply. What is not given is as it should be.

    Attributes:
        status: of the reply; from 300 on it gets an error body with ``code``.
        code: S3 code of the error body; empty: no body.
        headers: set on the reply, over what it would have; None removes one.
        ignore_range: reply 200 with the whole object.
        extra_xml: put into the error body, such as ``<Region>...</Region>``.
        chunked: no Content-Length but chunks.
        cut_after_bytes: close properly after so many bytes of the body.
        reset_after_bytes: reset the connection after so many bytes.
        stall_after_bytes: stop sending there until `FaultServer.release` is set, then close.
        before_head: let the last three happen before the head is sent.
        body: sent instead of the object's bytes.
    """

    status: int | None = None
    code: str = ""
    headers: Mapping[str, str | None] = field(default_factory=dict)
    ignore_range: bool = False
    extra_xml: str = ""
    chunked: bool = False
    cut_after_bytes: int | None = None
    reset_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    before_head: bool = False
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it came. ``headers`` have names in lower case."""

    method: str
    name: str
    query: Mapping[str, Sequence[str]]
    headers: Mapping[str, str]
    raw_path: str

    @property
    def region(self) -> str | None:
        """Region of the signature; None for an unsigned request."""
        scope = _SCOPE.search(self.headers.get("authorization", ""))
        return scope.group(2) if scope else None

    @property
    def access_key(self) -> str | None:
        scope = _SCOPE.search(self.headers.get("authorization", ""))
        return scope.group(1) if scope else None


class FaultServer(LoopbackServer):
    """The server. Objects are named ``bucket/key``; requests come in path style.

    Args:
        tls: for HTTPS.
        page_keys: most keys in one page of a listing.

    Attributes:
        requests: all requests so far, in order of arrival.
        release: ends all stalls.
        objects: data and ETag by name; a test may change them at any time.
        regions: bucket to region; a bucket not in here is in every region.
        region_hint: ``header``, ``body`` (400 with <Region>), or ``none``.
        expired_keys: access keys whose token has expired.
        allow_unsigned: else unsigned requests get 403.
        empty_pages: so many pages without keys come before each listing's first key.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, page_keys: int = 1000) -> None:
        super().__init__(_Handler, tls)
        self.page_keys = page_keys
        self.requests: list[SeenRequest] = []
        self.release = threading.Event()
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.buckets: set[str] = set()
        self.regions: dict[str, str] = {}
        self.region_hint = "header"
        self.expired_keys: set[str] = set()
        self.allow_unsigned = False
        self.empty_pages = 0
        self._scripts: dict[tuple[str, str], list[Fault | None]] = {}
        self._forever: dict[tuple[str, str], Fault] = {}
        self._lock = threading.Lock()

    def put(self, bucket: str, key: str, data: bytes, etag: str | None = None) -> str:
        """Store an object; returns its ETag, with quotes."""
        etag = etag or f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        self.buckets.add(bucket)
        self.objects[f"{bucket}/{key}"] = (data, etag)
        return etag

    def script(
        self, method: str, name: str, faults: Sequence[Fault | None], then: Fault | None = None
    ) -> None:
        """Faults of the next requests for ``bucket/key`` (or ``bucket`` for listings), in order.

        Args:
            faults: one for each attempt; None is a good reply.
            then: for all attempts after those.
        """
        with self._lock:
            self._scripts[method, name] = list(faults)
            self._forever.pop((method, name), None)
            if then is not None:
                self._forever[method, name] = then

    def seen(self, method: str, name: str | None = None) -> list[SeenRequest]:
        """The requests with this method (and for this object) so far."""
        return [r for r in self.requests if r.method == method and name in (None, r.name)]

    def stop(self) -> None:
        self.release.set()
        super().stop()

    def next_fault(self, request: SeenRequest) -> Fault:
        """Log a request and take its fault; for the handler."""
        key = (request.method, request.name)
        with self._lock:
            self.requests.append(request)
            waiting = self._scripts.get(key)
            fault = waiting.pop(0) if waiting else self._forever.get(key)
        return fault or self._policy_fault(request) or Fault()

    def _policy_fault(self, request: SeenRequest) -> Fault | None:
        bucket = request.name.partition("/")[0]
        if request.region is None and not self.allow_unsigned:
            return Fault(status=403, code="AccessDenied")
        if request.access_key in self.expired_keys:
            return Fault(status=400, code="ExpiredToken")
        region = self.regions.get(bucket)
        if region is None or request.region in (None, region):
            return None
        if self.region_hint == "body" and request.method != "HEAD":
            xml = f"<Region>{region}</Region>"
            return Fault(status=400, code="AuthorizationHeaderMalformed", extra_xml=xml)
        hint = {"x-amz-bucket-region": region} if self.region_hint != "none" else {}
        # Nobody may follow this one: the signature would go to a stranger.
        hint["Location"] = "http://127.0.0.1:9/elsewhere"
        return Fault(status=301, code="PermanentRedirect", headers=hint)


class _Handler(LoopbackHandler):
    owner: FaultServer

    def do_GET(self) -> None:  # noqa: N802
        self._answer()

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer()

    def do_PUT(self) -> None:  # noqa: N802
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        request = SeenRequest(
            self.command,
            unquote(url.path).removeprefix("/"),
            parse_qs(url.query, keep_blank_values=True),
            {name.lower(): value for name, value in self.headers.items()},
            url.path,
        )
        body = self.rfile.read(int(request.headers.get("content-length", 0)))
        fault = self.owner.next_fault(request)
        if fault.status is not None and fault.status >= 300:
            self._error(fault.status, fault.code, fault)
        elif request.name.partition("/")[0] not in self.owner.buckets:
            self._error(404, "NoSuchBucket", fault)
        elif "/" not in request.name:
            xml = b"" if self.command == "HEAD" else listing_xml(self.owner, request)
            self._send(fault, 200, {"Content-Type": "application/xml"}, xml)
        elif self.command == "PUT":
            self._put(request, body, fault)
        else:
            self._object(request, fault)

    def _put(self, request: SeenRequest, body: bytes, fault: Fault) -> None:
        if request.headers.get("if-none-match") == "*" and request.name in self.owner.objects:
            self._error(412, "PreconditionFailed", fault)
            return
        bucket, _, key = request.name.partition("/")
        self._send(fault, 200, {"ETag": self.owner.put(bucket, key, body)}, b"")

    def _object(self, request: SeenRequest, fault: Fault) -> None:
        found = self.owner.objects.get(request.name)
        if found is None:
            self._error(404, "NoSuchKey", fault)
            return
        data, etag = found
        if request.headers.get("if-match", etag) != etag:
            self._error(412, "PreconditionFailed", fault)
            return
        headers = {"ETag": etag, "Content-Type": "binary/octet-stream"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None or fault.ignore_range:
            self._send(fault, fault.status or 200, headers, data)
            return
        start, end = int(wanted.group(1)), min(int(wanted.group(2)) + 1, len(data))
        if start >= end:
            self._error(416, "InvalidRange", fault)
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._send(fault, fault.status or 206, headers, data[start:end])

    def _error(self, status: int, code: str, fault: Fault) -> None:
        body = b""
        if code and self.command != "HEAD":
            text = f"<Code>{code}</Code><Message>{code} was scripted</Message>{fault.extra_xml}"
            resource = f"<Resource>{escape(self.path)}</Resource>"
            body = f'<?xml version="1.0"?><Error>{text}{resource}</Error>'.encode()
        self._send(fault, status, {"Content-Type": "application/xml"}, body)

    def _send(self, fault: Fault, status: int, headers: dict[str, str], body: bytes) -> None:
        body = body if fault.body is None else fault.body
        headers["x-amz-request-id"] = f"request-{len(self.owner.requests)}"
        framing = {"Transfer-Encoding": "chunked"} if fault.chunked else {}
        framing = framing or {"Content-Length": str(len(body))}
        merged: dict[str, str | None] = {k.lower(): v for k, v in (headers | framing).items()}
        merged |= {k.lower(): v for k, v in fault.headers.items()}
        if fault.before_head and self._breaks(fault, 0):
            return
        self.send_response(status)
        for name, value in merged.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if "content-length" in merged and merged["content-length"] is None:
            self.close_connection = True
        if self.command != "HEAD":
            self._send_body(fault, body)

    def _send_body(self, fault: Fault, body: bytes) -> None:
        limits = (fault.cut_after_bytes, fault.reset_after_bytes, fault.stall_after_bytes)
        limit = next((limit for limit in limits if limit is not None), None)
        part = body if limit is None else body[:limit]
        if fault.chunked:
            for start in range(0, len(part), 1000):
                piece = part[start : start + 1000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if limit is None:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(part)
        if limit is not None:
            self._breaks(fault, limit)

    def _breaks(self, fault: Fault, sent_bytes: int) -> bool:
        """Cut, reset or stall now, as the fault says."""
        self.close_connection = True
        if fault.stall_after_bytes == sent_bytes:
            self.owner.release.wait()
        elif fault.reset_after_bytes == sent_bytes:
            # Closing with a linger time of zero sends a reset.
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
        elif fault.cut_after_bytes != sent_bytes:
            return False
        return True
