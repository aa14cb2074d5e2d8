"""The rig's buckets and their objects, and where so asked all earlier states of them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from fastload_common.testing.rig.objects import Content, Held, StoredObject, checksum, etag_of

__all__ = ["Store"]


class Store:
    """Thread-safe.

    Attributes:
        versioned: buckets that keep all states of their objects, each with a version id.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, StoredObject]] = {}
        self._versions: dict[tuple[str, str, str], StoredObject] = {}
        self.versioned: set[str] = set()

    def put(
        self,
        bucket: str,
        key: str,
        data: bytes | Content,
        *,
        etag: str | None = None,
        checksums: Collection[str] | Mapping[str, str] = (),
        if_none: bool = False,
    ) -> StoredObject | None:
        """Store an object, making the bucket. None: ``if_none``, and there is one already."""
        content: Content = Held(data) if isinstance(data, bytes) else data
        if isinstance(checksums, Mapping):
            shown = dict(checksums)
        elif isinstance(data, bytes):
            shown = {name: checksum(name, data) for name in checksums}
        else:
            shown = dict.fromkeys(checksums, "")
            if shown:
                raise ValueError("give the checksums' text: generated content is not read through")
        if etag is None:
            seed = getattr(content, "seed", 0)
            etag = (
                etag_of(data)
                if isinstance(data, bytes)
                else etag_of(b"%d %d" % (content.size_bytes, seed))
            )
        with self._lock:
            objects = self._buckets.setdefault(bucket, {})
            if if_none and key in objects:
                return None
            version = None
            if bucket in self.versioned:
                version = f"version{len(self._versions) + 1}"
            stored = StoredObject(content, etag, shown, version)
            objects[key] = stored
            if version is not None:
                self._versions[bucket, key, version] = stored
            return stored

    def make_bucket(self, bucket: str) -> None:
        with self._lock:
            self._buckets.setdefault(bucket, {})

    def delete(self, bucket: str, key: str) -> None:
        """Take an object away, if it is there; its earlier states stay."""
        with self._lock:
            self._buckets.get(bucket, {}).pop(key, None)

    def has_bucket(self, bucket: str) -> bool:
        with self._lock:
            return bucket in self._buckets

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        """Key to object as they are now."""
        with self._lock:
            return dict(self._buckets.get(bucket, {}))

    def find(self, bucket: str, key: str, version: str | None = None) -> StoredObject | None:
        with self._lock:
            if version is not None:
                return self._versions.get((bucket, key, version))
            return self._buckets.get(bucket, {}).get(key)
