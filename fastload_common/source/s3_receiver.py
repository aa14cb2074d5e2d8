"""One connection that receives ranges of a bucket's objects: one attempt a call, all checked."""

from __future__ import annotations

import contextlib
import logging

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import (
    FastloadError,
    ObjectChangedError,
    RangeMismatchError,
    SourceError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receipt
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import ReplyHead
from fastload_common.source.range_reply import check_range_reply
from fastload_common.source.s3_errors import (
    ERROR_BODY_LIMIT_BYTES,
    S3Fault,
    fault_error,
    parse_fault,
)
from fastload_common.source.s3_session import S3Session
from fastload_common.source.s3_target import S3Target, SignedGet
from fastload_common.source.uri import S3Location

__all__ = ["S3Receiver"]

_LOG = logging.getLogger(__name__)


class S3Receiver:
    """See `Receiver`. After an abort it fails for ever: close it and open another."""

    def __init__(
        self, session: S3Session, location: S3Location, settings: Settings, clock: Clock
    ) -> None:
        self._session = session
        self._location = location
        self._settings = settings
        self._clock = clock
        self._connection: HttpConnection | None = None
        self._target: S3Target | None = None
        self._aborted = False

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        """See `Receiver.receive`."""
        if len(buffer) != byte_range.size_bytes or not buffer:
            raise ValueError(f"buffer of {len(buffer)} bytes for {byte_range}")
        key = self._key(object_id)
        renewed: set[str] = set()
        try:
            while True:
                signed = self._session.sign_get(object_id, key, byte_range)
                connection = self._connect(signed.target)
                started_s = self._clock.monotonic_s()
                head = connection.get(signed.path, signed.headers)
                first_byte_s = self._clock.monotonic_s() - started_s
                if 200 <= head.status < 300:
                    try:
                        self._accept(object_id, byte_range, head, buffer, connection)
                    except (RangeMismatchError, ObjectChangedError) as error:
                        if not _may_be_chance(error, head, renewed):
                            raise
                        continue
                    total_s = self._clock.monotonic_s() - started_s
                    return Receipt(len(buffer), first_byte_s, total_s, head.new_connection)
                body = connection.body_capped(head, ERROR_BODY_LIMIT_BYTES)
                fault = parse_fault(head.status, head.headers, body)
                if not self._session.renew_for(fault, signed.target, renewed):
                    raise self._fault_error(object_id, signed, fault)
        except FastloadError as error:
            error.fields |= {"uri": object_id.uri, "range": str(byte_range)}
            raise

    def abort(self) -> None:
        """See `Receiver.abort`."""
        self._aborted = True
        connection = self._connection
        if connection is not None:
            connection.abort()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connect(self, target: S3Target) -> HttpConnection:
        if (
            self._connection is None
            or self._target is None
            or self._target.endpoint != target.endpoint
        ):
            self.close()
            self._connection = HttpConnection(
                target.endpoint,
                self._session.tls(),
                self._settings.connect_timeout_s,
                self._settings.read_timeout_s,
                self._clock,
            )
            # An abort that came while this one was made did not see it.
            if self._aborted:
                self._connection.abort()
        self._target = target
        return self._connection

    def _accept(
        self,
        object_id: ObjectId,
        byte_range: ByteRange,
        head: ReplyHead,
        buffer: memoryview,
        connection: HttpConnection,
    ) -> None:
        try:
            check_range_reply(object_id, byte_range, head)
        except SourceError as error:
            # The body is not wanted, and may be the whole object.
            connection.close()
            error.fields |= {"endpoint": str(connection.endpoint)}
            raise
        connection.body_into(head, buffer)

    def _fault_error(self, object_id: ObjectId, signed: SignedGet, fault: S3Fault) -> SourceError:
        error = fault_error(fault, f"read {object_id.uri}", pinned=True, **signed.target.facts())
        if isinstance(error, ObjectChangedError):
            error.fields["expected_etag"] = object_id.etag
            error.fields["found_etag"] = self._present_etag(object_id) or "none"
        return error

    def _present_etag(self, object_id: ObjectId) -> str | None:
        with contextlib.suppress(FastloadError):
            key = self._key(object_id)
            reply = self._session.call("head_object", f"stat {object_id.uri}", Key=key)
            return str(reply.get("ETag"))
        return None

    def _key(self, object_id: ObjectId) -> str:
        prefix = f"s3://{self._location.bucket}/"
        if not object_id.uri.startswith(prefix):
            raise ValueError(f"{object_id.uri} is not in bucket {self._location.bucket}")
        return object_id.uri.removeprefix(prefix)


def _may_be_chance(error: SourceError, head: ReplyHead, renewed: set[str]) -> bool:
    """Whether to ask once more, on the new connection that comes after such a reply.

    One damaged reply must not end a load, and on a kept connection it may be the answer to another
    request. What is wrong twice is how the endpoint is.
    """
    if "reply" in renewed or (isinstance(error, ObjectChangedError) and head.new_connection):
        return False
    renewed.add("reply")
    _LOG.info("asked once more after: %s", error)
    return True
