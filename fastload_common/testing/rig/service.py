"""What S3 answers to a request: signatures, objects, listings, conditional puts. No sockets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastload_common.ranges import ByteRange
from fastload_common.testing.rig.effects import Error, Garbage, Redirect
from fastload_common.testing.rig.faults import Plan
from fastload_common.testing.rig.listing import listing_xml
from fastload_common.testing.rig.log import LoggedRequest
from fastload_common.testing.rig.objects import CHECKSUMS, StoredObject, checksum
from fastload_common.testing.rig.replies import (
    Reply,
    checksum_headers,
    error_reply,
    object_reply,
    xml_reply,
)
from fastload_common.testing.rig.requests import Asked, parse_range
from fastload_common.testing.rig.sigv4 import SignedRequest, check_signature, signature_region

if TYPE_CHECKING:
    from fastload_common.testing.rig.server import Rig

__all__ = ["Service"]

_SUBRESOURCES = {
    "location": b"<LocationConstraint>%s</LocationConstraint>",
    "versioning": b"<VersioningConfiguration/>",
}


class Service:
    """Answers for one rig, whose settings may change between any two requests."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def begin(self, asked: Asked, connection: int) -> LoggedRequest:
        """Log a request that has arrived."""
        bucket, key = asked.place(self._rig.domains)
        query = asked.query
        kind = asked.method if key else "OTHER"
        if not key and asked.method == "GET" and not set(_SUBRESOURCES) & set(query):
            kind, key = "LIST", query.get("prefix", "")
        byte_range = None
        if kind in ("GET", "HEAD"):
            stored = self._rig.store.find(bucket, key, query.get("versionId"))
            if stored is not None:
                byte_range = parse_range(asked.headers.get("range"), stored.size_bytes)
        log = self._rig.log
        return log.begin(kind, bucket, key, query, asked.headers, byte_range, connection)

    def answer(
        self,
        plan: Plan,
        request: LoggedRequest,
        asked: Asked,
        body: bytes,
        trailer: Mapping[str, str],
    ) -> Reply:
        """The reply, with the harm that is done to its head and framing."""
        refusal = plan.answer
        if isinstance(refusal, Garbage):
            return Reply(0)
        if refusal is None:
            refusal = self._refusal(request, asked, body)
        if refusal is not None:
            reply = error_reply(refusal, f"/{request.name}")
        else:
            reply = self._good(request, asked, plan, body, trailer)
        reply.harm(plan)
        return reply

    def _refusal(
        self, request: LoggedRequest, asked: Asked, body: bytes
    ) -> Error | Redirect | None:
        rig = self._rig
        if rig.allow_unsigned and not request.signed:
            return None
        signed = SignedRequest(asked.method, asked.target, asked.headers, body)
        now_s = rig.clock.wall_s() + rig.clock_offset_s
        error = check_signature(signed, rig.keys, now_s, rig.max_skew_s)
        region = rig.regions.get(request.bucket)
        if error is None and region not in (None, signature_region(asked.headers)):
            return Redirect(region)
        return error

    def _good(
        self,
        request: LoggedRequest,
        asked: Asked,
        plan: Plan,
        body: bytes,
        trailer: Mapping[str, str],
    ) -> Reply:
        store = self._rig.store
        if request.kind == "OTHER" and asked.method == "PUT":
            store.make_bucket(request.bucket)
            return Reply(200)
        if not store.has_bucket(request.bucket):
            return error_reply(Error(404, "NoSuchBucket"), f"/{request.name}")
        if request.kind == "LIST":
            try:
                objects = store.objects(request.bucket)
                page = listing_xml(request.bucket, objects, request.query, self._rig.page_keys)
            except ValueError:
                return error_reply(Error(400, "InvalidArgument"), f"/{request.name}")
            return xml_reply(200, page)
        if request.kind in ("GET", "HEAD"):
            return self._object(request, plan)
        if request.kind == "PUT":
            return self._store(request, body, {**request.headers, **trailer})
        return self._other(request, asked)

    def _object(self, request: LoggedRequest, plan: Plan) -> Reply:
        # Found anew: since the request was logged, the object may have been replaced.
        version = request.query.get("versionId")
        stored = self._rig.store.find(request.bucket, request.key, version)
        if stored is None:
            code = "NoSuchKey" if version is None else "NoSuchVersion"
            return error_reply(Error(404, code), f"/{request.name}")
        if request.headers.get("if-match", stored.etag) not in (stored.etag, "*"):
            return error_reply(Error(412, "PreconditionFailed"), f"/{request.name}")
        text = request.headers.get("range")
        part = parse_range(text, stored.size_bytes)
        reply = object_reply(stored, part, text is not None, plan)
        wants_checksum = request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
        if wants_checksum and part == ByteRange(0, stored.size_bytes):
            reply.headers |= checksum_headers(stored)
        return reply

    def _store(self, request: LoggedRequest, body: bytes, headers: Mapping[str, str]) -> Reply:
        given = {
            name: headers[f"x-amz-checksum-{name}"]
            for name in CHECKSUMS
            if f"x-amz-checksum-{name}" in headers
        }
        if any(checksum(name, body) != text for name, text in given.items()):
            return error_reply(Error(400, "BadDigest"), f"/{request.name}")
        stored: StoredObject | None = self._rig.store.put(
            request.bucket,
            request.key,
            body,
            checksums=given,
            if_none=headers.get("if-none-match") == "*",
        )
        if stored is None:
            return error_reply(Error(412, "PreconditionFailed"), f"/{request.name}")
        found = {"etag": stored.etag} | checksum_headers(stored)
        return Reply(200, found | stored.version_header())

    def _other(self, request: LoggedRequest, asked: Asked) -> Reply:
        region = self._rig.regions.get(request.bucket, self._rig.region)
        for name, document in _SUBRESOURCES.items():
            if name in request.query:
                shown = b"" if region == "us-east-1" else region.encode()
                return xml_reply(200, document % shown if b"%s" in document else document)
        if asked.method == "HEAD":
            return Reply(200, {"x-amz-bucket-region": region})
        if asked.method == "DELETE":
            self._rig.store.delete(request.bucket, request.key)
            return Reply(204)
        return error_reply(Error(405, "MethodNotAllowed"), f"/{request.name}")
