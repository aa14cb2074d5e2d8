"""What one rank needs, as byte ranges for each object, and as a message to other ranks. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fastload_common.plan.extents import MOST_SPANS, Ints, ReadTable
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId

__all__ = ["Needs"]

_MAGIC = b"FLN1"
_HEAD = struct.Struct("<4sIQQ")  # magic, objects, spans, needed bytes
# All offsets of all objects together stay below; so their sums fit into 64 bits.
_MOST_BYTES = 1 << 61


@dataclass(frozen=True, eq=False)
class Needs:
    """The bytes that one rank needs.

    Attributes:
        spans: for each object of the agreed table, int64 rows ``[start, end)``, ascending, with at
            least one byte between two.
        needed_bytes: of the reads themselves, the same view once; the spans hold the merged gaps,
            too.
    """

    spans: tuple[Ints, ...]
    needed_bytes: int

    @classmethod
    def of(
        cls, reads: Sequence[TensorRead], objects: Sequence[ObjectId], *, gap_bytes: int
    ) -> Needs:
        """The needs of a list of reads.

        Args:
            reads: in any order.
            objects: the table that all ranks agreed on.
            gap_bytes: needed ranges that are no farther apart become one. Longer gaps are merged
                where there would be more than `MOST_SPANS` ranges.

        Raises:
            ValueError: a read is of an object that is not in the table.
        """
        table = ReadTable(reads, objects)
        if len(table.objects) > len(objects):
            raise ValueError(f"{table.objects[len(objects)].uri} is not among the agreed objects")
        spans = table.spans(max(gap_bytes, 0))
        covered_bytes = sum(int((rows[:, 1] - rows[:, 0]).sum()) for rows in spans)
        return cls(tuple(spans), min(table.needed_bytes(), covered_bytes))

    def encode(self) -> bytes:
        """A message that `decode` understands; about 2 to 6 bytes for each span."""
        counts = np.array([len(rows) for rows in self.spans], dtype=np.int64)
        parts = [np.diff(rows.reshape(-1), prepend=np.int64(0)) for rows in self.spans]
        numbers = np.concatenate([counts, *parts])
        # Byte k of all numbers together: most are zero.
        planes = numbers.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes()
        head = _HEAD.pack(_MAGIC, len(counts), int(counts.sum()), self.needed_bytes)
        return head + zlib.compress(planes, 1)

    @classmethod
    def decode(cls, data: bytes, objects: int) -> Needs:
        """Read a message. Takes at most 40 MiB, whatever it says.

        Args:
            data: from `encode`, of a rank that may be anybody.
            objects: how many the agreed table has.

        Raises:
            ValueError: it is not the needs of that many objects.
        """
        if len(data) < _HEAD.size:
            raise ValueError(f"needs of {len(data)} bytes, less than their head")
        magic, count, spans, needed_bytes = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"needs begin with {magic!r} instead of {_MAGIC!r}")
        if count != objects or spans > MOST_SPANS:
            raise ValueError(f"needs of {count} objects and {spans} spans; {objects} were agreed")
        numbers = _unpack(data[_HEAD.size :], count + 2 * spans)
        counts, deltas = numbers[:count], numbers[count:]
        if (counts < 0).any() or (counts > spans).any() or int(counts.sum()) != spans:
            raise ValueError("needs whose counts are not those of their spans")
        borders = np.concatenate(([0], np.cumsum(2 * counts)))
        # The first number of an object may be 0, the others are distances between borders.
        least = np.ones(len(deltas), dtype=np.int64)
        least[borders[:-1][counts > 0]] = 0
        if (deltas < least).any() or float(deltas.sum(dtype=np.float64)) >= _MOST_BYTES:
            raise ValueError("needs whose spans are not ascending, or not of this world")
        found = tuple(
            np.cumsum(deltas[first:last]).reshape(-1, 2) for first, last in pairwise(borders)
        )
        covered_bytes = int(deltas[1::2].sum())
        if needed_bytes > covered_bytes:
            raise ValueError(f"needs of {needed_bytes} bytes in spans of {covered_bytes}")
        return cls(found, needed_bytes)


def _unpack(packed: bytes, count: int) -> npt.NDArray[np.int64]:
    size_bytes = 8 * count
    unpacker = zlib.decompressobj()
    try:
        # One more than there may be, so that too much is seen and never unpacked.
        planes = unpacker.decompress(packed, size_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"needs that cannot be unpacked: {error}") from None
    if len(planes) != size_bytes or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"needs that do not unpack to {size_bytes} bytes")
    if not count:
        return np.empty(0, dtype=np.int64)
    table = np.frombuffer(planes, dtype=np.uint8).reshape(8, count)
    return np.ascontiguousarray(table.T).view("<i8").reshape(-1).astype(np.int64)
