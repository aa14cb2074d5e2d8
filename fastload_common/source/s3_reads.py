"""Signs ranged reads of a bucket's objects, and judges what the store says of them.

One logic for the two that make such requests: a receiver of this process, and other processes.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping

from fastload_common.errors import FastloadError, ObjectChangedError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Refusal
from fastload_common.source.http_message import Endpoint
from fastload_common.source.s3_errors import fault_error, parse_fault
from fastload_common.source.s3_session import S3Session
from fastload_common.source.s3_target import SignedGet
from fastload_common.source.uri import S3Location

__all__ = ["S3Reads", "S3SignedRead"]


class S3Reads:
    """Implements `RemoteReads` for one bucket."""

    def __init__(self, session: S3Session, location: S3Location) -> None:
        self._session = session
        self._location = location

    def sign(self, object_id: ObjectId, byte_range: ByteRange) -> S3SignedRead:
        """See `RemoteReads.sign`."""
        key = self._key(object_id)
        signed = self._session.sign_get(object_id, key, byte_range)
        return S3SignedRead(self._session, object_id, byte_range, key, signed)

    def sign_now(self, object_id: ObjectId, byte_range: ByteRange) -> S3SignedRead | None:
        """See `RemoteReads.sign_now`."""
        return self.sign(object_id, byte_range) if self._session.can_sign_now() else None

    def tls(self) -> ssl.SSLContext | None:
        """The context for connections of this process; None for plain HTTP."""
        return self._session.tls()

    def _key(self, object_id: ObjectId) -> str:
        prefix = f"s3://{self._location.bucket}/"
        if not object_id.uri.startswith(prefix):
            raise ValueError(f"{object_id.uri} is not in bucket {self._location.bucket}")
        return object_id.uri.removeprefix(prefix)


class S3SignedRead:
    """Implements `SignedRead`."""

    __slots__ = ("_key", "_session", "_signed", "_state", "byte_range", "object_id")

    def __init__(
        self,
        session: S3Session,
        object_id: ObjectId,
        byte_range: ByteRange,
        key: str,
        signed: SignedGet,
    ) -> None:
        self._session = session
        self.object_id = object_id
        self.byte_range = byte_range
        self._key = key
        self._signed = signed
        self._state = session.state()

    @property
    def endpoint(self) -> Endpoint:
        return self._signed.target.endpoint

    @property
    def ca_file(self) -> str | None:
        return self._signed.target.ca_bundle

    @property
    def path(self) -> str:
        return self._signed.path

    @property
    def headers(self) -> Mapping[str, str]:
        return self._signed.headers

    def judge(self, refusal: Refusal, tried: set[str]) -> SourceError | None:
        """See `SignedRead.judge`."""
        target, uri = self._signed.target, self.object_id.uri
        fault = parse_fault(refusal.status, refusal.headers, refusal.body)
        try:
            if not self._state.is_closed and self._session.renew_for(fault, target, tried):
                return None
            error = fault_error(fault, f"read {uri}", pinned=True, **target.facts())
            if isinstance(error, ObjectChangedError):
                error.fields["expected_etag"] = self.object_id.etag
                error.fields["found_etag"] = self._present_etag() or "none"
            return error
        finally:
            if self._state.is_closed:
                # The load has ended meanwhile: nobody else closes what was opened for this.
                self._session.close()

    def failed(self, error: SourceError, tried: set[str]) -> bool:
        """See `SignedRead.failed`: there is nobody else."""
        return False

    def _present_etag(self) -> str | None:
        if self._state.is_closed:
            return None
        with contextlib.suppress(FastloadError):
            asked = f"stat {self.object_id.uri}"
            reply = self._session.call("head_object", asked, Key=self._key)
            return str(reply.get("ETag"))
        return None
