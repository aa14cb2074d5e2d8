"""The plan's records: frozen, plain, without torch and without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["Chunk"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One range that is fetched by one request into one staging slot.

    Attributes:
        object_id: the pinned object.
        byte_range: not empty, at most the arena's slot size.
        needed_bytes: how many of its bytes some transfer uses; the rest is over-read.
    """

    object_id: ObjectId
    byte_range: ByteRange
    needed_bytes: int
