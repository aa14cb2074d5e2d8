"""One connection that receives ranges of objects over HTTP: one attempt a call, all checked."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import FastloadError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receipt, Refusal, RemoteReads, SignedRead
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import ERROR_BODY_LIMIT_BYTES, ReplyHead
from fastload_common.source.range_reply import check_range_reply
from fastload_common.source.second_chance import may_be_chance

__all__ = ["RangeReceiver"]


class RangeReceiver:
    """See `Receiver`. After an abort it fails for ever: close it and open another.

    Args:
        reads: signs each request, and judges refusals.
        tls: the context for a file of authorities, as `SignedRead.ca_file` names it.
        settings: timeouts.
        clock: for receipts.
    """

    def __init__(
        self,
        reads: RemoteReads,
        tls: Callable[[str | None], ssl.SSLContext | None],
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._reads = reads
        self._tls = tls
        self._settings = settings
        self._clock = clock
        self._connection: HttpConnection | None = None
        self._aborted = False

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        """See `Receiver.receive`."""
        if len(buffer) != byte_range.size_bytes or not buffer:
            raise ValueError(f"buffer of {len(buffer)} bytes for {byte_range}")
        tried: set[str] = set()
        try:
            while True:
                signed = self._reads.sign(object_id, byte_range)
                try:
                    reply = self._attempt(signed, buffer, tried)
                except SourceError as error:
                    if self._aborted or not signed.failed(error, tried):
                        raise
                    continue
                if isinstance(reply, Receipt):
                    return reply
                if reply is not None and (refused := signed.judge(reply, tried)) is not None:
                    raise refused
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

    def _attempt(
        self, signed: SignedRead, buffer: memoryview, tried: set[str]
    ) -> Receipt | Refusal | None:
        """One request; None: its reply was not what was asked, which may be chance."""
        connection = self._connect(signed)
        started_s = self._clock.monotonic_s()
        head = connection.get(signed.path, signed.headers)
        first_byte_s = self._clock.monotonic_s() - started_s
        if not 200 <= head.status < 300:
            body = connection.body_capped(head, ERROR_BODY_LIMIT_BYTES)
            return Refusal(head.status, head.headers, body)
        try:
            self._accept(signed, head, buffer, connection)
        except SourceError as error:
            if not may_be_chance(error, tried, new_connection=head.new_connection):
                raise
            return None
        total_s = self._clock.monotonic_s() - started_s
        return Receipt(len(buffer), first_byte_s, total_s, head.new_connection)

    def _connect(self, signed: SignedRead) -> HttpConnection:
        if self._connection is None or self._connection.endpoint != signed.endpoint:
            self.close()
            self._connection = HttpConnection(
                signed.endpoint,
                self._tls(signed.ca_file),
                self._settings.connect_timeout_s,
                self._settings.read_timeout_s,
                self._clock,
            )
            # An abort that came while this one was made did not see it.
            if self._aborted:
                self._connection.abort()
        return self._connection

    def _accept(
        self,
        signed: SignedRead,
        head: ReplyHead,
        buffer: memoryview,
        connection: HttpConnection,
    ) -> None:
        try:
            check_range_reply(signed.object_id, signed.byte_range, head)
        except SourceError as error:
            # The body is not wanted, and may be the whole object.
            connection.close()
            error.fields |= {"endpoint": str(connection.endpoint)}
            raise
        connection.body_into(head, buffer)
