"""Byte ranges and the identity of an object. Knows the standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["ByteRange", "ObjectId", "ReadRange"]


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """The bytes ``[start, end)`` of an object. May be empty; never negative."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a byte range: [{self.start}, {self.end})")

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def intersect(self, other: ByteRange) -> ByteRange | None:
        """The common part, or None where there is none (touching is none)."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return ByteRange(start, end) if start < end else None

    def pieces(self, size_bytes: int) -> Iterator[ByteRange]:
        """The range cut from its start: each piece has ``size_bytes``, the last one the rest."""
        for start in range(self.start, self.end, size_bytes):
            yield ByteRange(start, min(start + size_bytes, self.end))

    def contains(self, other: ByteRange) -> bool:
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"


@dataclass(frozen=True, slots=True)
class ObjectId:
    """One immutable state of one object.

    Attributes:
        uri: ``s3://bucket/key``, a file of ``oci://registry/repository:tag``, or an absolute
            ``file:///path``; safe to print.
        etag: what pins this state: S3's ETag with its quotes, a layer's digest (with ``+offset``
            for a file in it), or for a file a token made of inode, size, mtime and ctime. None
            where the store has none.
        size_bytes: size of the whole object.
    """

    uri: str
    etag: str | None
    size_bytes: int

    @property
    def is_one_state(self) -> bool:
        """Whether the ETag tells this state from all others: an empty or a weak one does not."""
        etag = self.etag or ""
        return bool(etag.strip().strip('"')) and not etag.lstrip().startswith("W/")


ReadRange = Callable[[ObjectId, ByteRange], bytes]
"""Reads exactly the range, or raises a `SourceError`. For small reads such as headers."""
