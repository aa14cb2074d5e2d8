"""The plan's records: plain, without torch and without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from fastload_common.plan.geometry import View
from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["Chunk", "Plan", "TensorRead"]


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


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A strided view of one tensor in one object that somebody needs.

    Attributes:
        object_id: the pinned object.
        data_start: first byte of the tensor's data in the object.
        itemsize_bytes: bytes of one element.
        view: sizes, strides and offset in elements, relative to data_start.
    """

    object_id: ObjectId
    data_start: int
    itemsize_bytes: int
    view: View


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests for a list of reads.

    Attributes:
        chunks: in the order in which they should be asked for.
        readers: for each chunk, the indices of the reads that take bytes from it.
        chunk_counts: for each read, how many chunks it takes bytes from (0 if it is empty).
        needed_bytes: bytes that the reads need (a range read twice counts once).
        fetched_bytes: bytes that the chunks hold.
    """

    chunks: list[Chunk]
    readers: list[list[int]]
    chunk_counts: list[int]
    needed_bytes: int
    fetched_bytes: int
