"""Ranges of many objects on one line, and ranges cut to chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fastload_common.plan.extents import Ints, ranges_of

__all__ = ["ALIGNMENT_BYTES", "Line", "check_chunk_bytes", "cut"]

# Chunks begin at multiples of this, so that what is aligned in the object is aligned in a
# staging slot (slots are page-aligned) and no element straddles two chunks. 64 is the widest
# vector load and a multiple of every element size.
ALIGNMENT_BYTES = 64


class Line:
    """Objects laid one behind the other, so that one array holds ranges of all of them.

    Args:
        lengths: bytes of each that ranges may lie in.
        apart_bytes: at least so much lies between two objects, so that none are merged.

    Raises:
        ValueError: their sum does not fit into 64 bits.
    """

    def __init__(self, lengths: Iterable[int], apart_bytes: int = ALIGNMENT_BYTES) -> None:
        bases, end = [0], 0
        for length in lengths:
            end += length + apart_bytes
            end += -end % ALIGNMENT_BYTES  # what is aligned in an object is so on the line
            bases.append(end)
        if end >= 1 << 62:
            raise ValueError(f"the objects' bytes do not fit into 64 bits: {end}")
        self.bases = np.array(bases, dtype=np.int64)

    def put(self, index: int, rows: Ints) -> Ints:
        """Offsets of one object as positions on the line."""
        placed: Ints = rows + self.bases[index]
        return placed

    def take(self, positions: Ints) -> tuple[Ints, Ints]:
        """Which object each position lies in, and at which offset."""
        objects = np.searchsorted(self.bases, positions, side="right") - 1
        return objects, positions - self.bases[objects]


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Raise ValueError unless chunks can be of that size."""
    if chunk_bytes % ALIGNMENT_BYTES or chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be a multiple of {ALIGNMENT_BYTES}: {chunk_bytes}")


def cut(first: Ints, end: Ints, chunk_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Cut ranges to chunks that begin at aligned offsets (the first one a little earlier).

    Returns:
        Starts and ends of the chunks, and which range each is of.
    """
    start = first - first % ALIGNMENT_BYTES
    counts = -(-(end - start) // chunk_bytes)
    of = np.repeat(np.arange(len(first)), counts)
    starts = start[of] + ranges_of(counts) * chunk_bytes
    return starts, np.minimum(starts + chunk_bytes, end[of]), of
