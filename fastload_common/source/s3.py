"""Objects in an S3 bucket. Small calls through botocore, bytes through our own connections.

Guarantees: every range is signed anew, pinned by If-Match, and its reply checked (status, range,
size, ETag, length) before a byte is placed; a store that sends us to another region is followed
once; an expired token is replaced once. A `Receiver` does not retry: the transfer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastload_common.checksums.algorithms import Checksum
from fastload_common.clock import Clock, SystemClock
from fastload_common.config import Settings
from fastload_common.errors import FastloadError, ObjectMissingError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, Receiver, RemoteReads, SourceDescription
from fastload_common.source.range_receiver import RangeReceiver
from fastload_common.source.s3_checksum import ChecksumReader
from fastload_common.source.s3_reads import S3Reads
from fastload_common.source.s3_session import S3Session
from fastload_common.source.small_reads import SmallReads
from fastload_common.source.uri import S3Location

__all__ = ["S3Source"]


class S3Source:
    """``s3://bucket/prefix`` as an `ObjectSource`.

    Holds plain data; connections and clients are made per process when first needed, so it may be
    pickled and used after a fork, and by any thread. Object versions are not pinned, only ETags:
    reading a version takes a permission of its own.

    Args:
        location: bucket and prefix.
        settings: timeouts, attempts, anonymous.
        clock: for receipts and for the waits between attempts of `read`.
    """

    def __init__(
        self, location: S3Location, settings: Settings, clock: Clock | None = None
    ) -> None:
        self._location = location
        self._settings = settings
        self._clock = clock or SystemClock()
        self._session = S3Session(location, settings, self._clock)
        self._reads = S3Reads(self._session, location)
        self._checksums = ChecksumReader(self._session)
        self._small = SmallReads(self._session.small_calls, self._receiver)

    @property
    def root(self) -> str:
        return self._location.uri

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        prefix = f"{self._location.prefix}/" if self._location.prefix else ""
        parameters = {"Prefix": prefix} | ({} if recursive else {"Delimiter": "/"})
        found = []
        for page in self._session.pages(f"list {self.root}", **parameters):
            for row in page.get("Contents", ()):
                key = row.get("Key", "").removeprefix(prefix)
                if key and not key.endswith("/"):
                    # Some gateways leave the ETag out of listings; without one nothing is pinned.
                    pinned = self._object_id(key, row, "Size")
                    if pinned.etag is None:
                        pinned = self.stat(key)
                    found.append(ListedObject(key, pinned))
        return sorted(found, key=lambda item: item.key)

    def stat(self, key: str) -> ObjectId:
        uri = f"{self.root}/{key}"
        try:
            reply = self._session.call("head_object", f"stat {uri}", Key=self._full_key(key))
        except FastloadError as error:
            error.fields["uri"] = uri
            raise
        return self._object_id(key, reply, "ContentLength")

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        return self._small.read(object_id, byte_range)

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        key = object_id.uri.removeprefix(f"s3://{self._location.bucket}/")
        return self._checksums.ask(object_id, key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        uri = f"{self.root}/{key}"
        try:
            self._session.call(
                "put_object", f"write {uri}", Key=self._full_key(key), Body=data, IfNoneMatch="*"
            )
        except SourceError as error:
            if error.fields.get("code") in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            if error.fields.get("status") == 412:
                return False
            error.fields["uri"] = uri
            raise
        return True

    def open_receiver(self) -> Receiver:
        return self._receiver(self._settings)

    def remote_reads(self, object_id: ObjectId) -> RemoteReads:
        """See `RemoteSource.remote_reads`."""
        return self._reads

    def describe(self) -> SourceDescription:
        try:
            target = self._session.target()
        except FastloadError as error:
            return SourceDescription("s3", self.root, {"error": str(error)})
        facts = target.facts() | {
            "addressing": target.addressing,
            "anonymous": "yes" if self._settings.anonymous else "no",
            "ca_bundle": target.ca_bundle or "none (plain HTTP)",
            "proxy": str(target.endpoint.proxy) if target.endpoint.proxy else "none",
        }
        return SourceDescription("s3", self.root, facts)

    def close(self) -> None:
        self._small.close()
        self._session.close()

    def __reduce__(self) -> tuple[type[S3Source], tuple[S3Location, Settings]]:
        return (S3Source, (self._location, self._settings))

    def _receiver(self, settings: Settings) -> Receiver:
        return RangeReceiver(self._reads, lambda _: self._reads.tls(), settings, self._clock)

    def _object_id(self, key: str, said: Mapping[str, Any], size: str) -> ObjectId:
        """From a row of a listing or the reply to a HEAD, whose ``size`` may be anything."""
        uri = f"{self.root}/{key}"
        size_bytes = said.get(size)
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise SourceError(
                f"the store does not say how large {uri} is",
                hint="the endpoint, or a proxy before it, does not answer as S3 does",
                uri=uri,
                found=size_bytes,
            )
        return ObjectId(uri, said.get("ETag"), size_bytes)

    def _full_key(self, key: str) -> str:
        if not key:
            raise ObjectMissingError("no object can have an empty key", uri=self.root)
        return f"{self._location.prefix}/{key}" if self._location.prefix else key
