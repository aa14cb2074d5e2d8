"""A prefix in S3: archives by their digest, and a manifest for each key, written last.

    <prefix>/v1/blobs/<sha256>
    <prefix>/v1/manifests/<key>

Nobody waits longer than the deadline for a call of this store, whatever the network does. Objects
are created if absent; one that was found to be damaged is overwritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_changes
from functools import partial
from typing import BinaryIO, cast

from fastload_common.clock import Clock, SystemClock
from fastload_common.compile_cache.key import is_key
from fastload_common.compile_cache.manifest import LIMITS, Limits, Manifest, decode_manifest
from fastload_common.compile_cache.stores.base import Entry, Package, Published, Sighting, look_at
from fastload_common.compile_cache.trust import Keys
from fastload_common.config import Settings
from fastload_common.errors import (
    BundleInvalidError,
    ObjectMissingError,
    SourceError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.source.s3_session import S3Session
from fastload_common.source.uri import s3_location
from fastload_common.units import MIB

__all__ = ["S3Store"]

_RANGE_BYTES = 8 * MIB
_CONNECTIONS = 4
_IN_MEMORY_BYTES = 256 * MIB
_MOST_ATTEMPTS = 3


class S3Store:
    """Entries below ``s3://bucket/prefix``.

    Args:
        uri: the prefix.
        settings: deadline, timeouts, credentials.
        keys: only entries signed with them are given out.
    """

    def __init__(
        self,
        uri: str,
        settings: Settings,
        *,
        keys: Keys | None = None,
        limits: Limits = LIMITS,
        clock: Clock | None = None,
    ) -> None:
        self._location = s3_location(uri)
        self._keys = keys
        self._limits = limits
        self._clock = clock or SystemClock()
        deadline_s = settings.compile_cache_deadline_s
        self._settings = with_changes(
            settings,
            deadline_s=deadline_s,
            max_attempts=min(settings.max_attempts, _MOST_ATTEMPTS),
            read_timeout_s=min(settings.read_timeout_s, deadline_s),
            connect_timeout_s=min(settings.connect_timeout_s, deadline_s),
        )

    @property
    def name(self) -> str:
        return self._location.uri

    def get(self, key: str) -> Entry | None:
        with self._source() as source:
            envelope = self._envelope(source, key)
            if envelope is None:
                return None
            manifest = decode_manifest(envelope, keys=self._keys, key=key, limits=self._limits)
            name = f"v1/blobs/{manifest.blob_sha256}"
            try:
                found = source.stat(name)
            except ObjectMissingError:
                raise BundleInvalidError(
                    "the entry's archive is gone",
                    hint="let a life-cycle rule of the bucket expire manifests before blobs",
                    uri=f"{self.name}/{name}",
                ) from None
            if found.size_bytes != manifest.blob_bytes:
                raise BundleInvalidError(
                    f"the archive has {found.size_bytes} bytes instead of {manifest.blob_bytes}",
                    uri=found.uri,
                )
            blob = _spool()
            try:
                _download(source, found, blob)
            except BaseException:
                blob.close()
                raise
        return Entry(manifest, envelope, blob, self.name)

    def put(self, package: Package, *, replace: bool = False) -> Published:
        manifest = package.manifest
        blob_name, name = f"v1/blobs/{manifest.blob_sha256}", f"v1/manifests/{manifest.key}"
        with self._source() as source:
            if not replace and _size(source, name) is not None:
                return Published(False, "it is there already")
            package.blob.seek(0)
            data = package.blob.read()
            if hashlib.sha256(data).hexdigest() != manifest.blob_sha256:
                raise BundleInvalidError("the archive changed while it was stored")
            # Of the right size means the right bytes, unless that is what was found to be wrong.
            if replace or _size(source, blob_name) != manifest.blob_bytes:
                self._write(source, blob_name, data)
            if replace:
                self._overwrite(name, package.envelope)
            elif not source.put_if_absent(name, package.envelope):
                return Published(False, "another process was faster")
        return Published(True)

    def keys(self) -> list[str]:
        with self._source("/v1/manifests") as source:
            try:
                return [row.key for row in source.list(recursive=False) if is_key(row.key)]
            except ObjectMissingError:
                return []

    def manifest(self, key: str) -> Manifest | None:
        return next((seen.manifest for seen in self.look([key]) if not seen.fault), None)

    def look(self, keys: list[str] | None = None) -> Iterator[Sighting]:
        """See `Store.look`; over one connection, within one deadline."""
        keys = self.keys() if keys is None else keys
        with self._source() as source:
            for key in keys:
                read = partial(self._envelope, source, key)
                seen = look_at(key, read, self._keys, self._limits)
                if seen is not None:
                    yield seen

    def manifests(self, most: int | None = None) -> Iterator[Manifest]:
        for seen in self.look(self.keys()[:most]):
            if seen.manifest is not None and not seen.fault:
                yield seen.manifest

    @contextlib.contextmanager
    def _source(self, below: str = "") -> Iterator[ObjectSource]:
        """A source of its own for each call: its deadline counts from when it is opened."""
        with contextlib.closing(open_source(f"{self.name}{below}", self._settings)) as source:
            yield source

    def _envelope(self, source: ObjectSource, key: str) -> bytes | None:
        try:
            found = source.stat(f"v1/manifests/{key}")
        except ObjectMissingError:
            return None
        if found.size_bytes > self._limits.manifest_bytes:
            raise BundleInvalidError(f"the manifest has {found.size_bytes} bytes", uri=found.uri)
        return source.read(found)

    def _write(self, source: ObjectSource, name: str, data: bytes) -> None:
        """An archive: it is named by its digest, so that one of that name may be overwritten."""
        if not source.put_if_absent(name, data):
            self._overwrite(name, data)

    def _overwrite(self, name: str, data: bytes) -> None:
        session = S3Session(self._location, self._settings, self._clock)
        prefix = f"{self._location.prefix}/" if self._location.prefix else ""
        try:
            session.call(
                "put_object", f"write {self.name}/{name}", Key=f"{prefix}{name}", Body=data
            )
        finally:
            session.close()


def _spool() -> BinaryIO:
    return cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES))


def _size(source: ObjectSource, name: str) -> int | None:
    try:
        return source.stat(name).size_bytes
    except ObjectMissingError:
        return None


def _download(source: ObjectSource, found: ObjectId, blob: BinaryIO) -> None:
    """All ranges, some at a time, written in order."""
    ranges = [
        ByteRange(start, min(start + _RANGE_BYTES, found.size_bytes))
        for start in range(0, found.size_bytes, _RANGE_BYTES)
    ]
    with ThreadPoolExecutor(min(_CONNECTIONS, max(1, len(ranges)))) as pool:
        try:
            for data in pool.map(lambda part: source.read(found, part), ranges):
                blob.write(data)
        except SourceError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    blob.seek(0)
