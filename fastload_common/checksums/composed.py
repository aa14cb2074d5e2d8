"""The CRC of a range, composed from CRCs of pieces that come in any order. Pure: no bytes, no I/O.

The same bytes may come more than once (a value that was read early, a second pass), cut at other
places. Each time they were used for something, so each time they must be right: a piece that
comes again is compared with the first one, and parts of it are put together until they can be.

Pieces are kept as they came and put together at the end. Were neighbours merged at once, a piece
that comes again could be compared with a much larger one only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from fastload_common.checksums.algorithms import Algorithm
from fastload_common.checksums.combine import combine
from fastload_common.ranges import ByteRange

__all__ = ["Composed", "ContradictionError"]


class ContradictionError(Exception):
    """Two readings of the same bytes differ. For the caller, who knows which object it is.

    Attributes:
        byte_range: where.
        first, again: the CRCs.
    """

    def __init__(self, byte_range: ByteRange, first: int, again: int) -> None:
        super().__init__(f"two readings of {byte_range} differ")
        self.byte_range = byte_range
        self.first = first
        self.again = again


@dataclass(slots=True)
class _Piece:
    byte_range: ByteRange
    value: int
    again: Composed | None = None  # parts of it that came again, while they are not all of it


class Composed:
    """The CRC of one range. Not thread-safe.

    Args:
        algorithm: of all values.
        span: the range that is to be composed.
    """

    def __init__(self, algorithm: Algorithm, span: ByteRange) -> None:
        self._algorithm = algorithm
        self.span = span
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []
        self._covered_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether every byte came."""
        return self._covered_bytes == self.span.size_bytes

    def cut(self, byte_range: ByteRange) -> list[ByteRange]:
        """Cut a range to the parts whose CRCs `add` takes, in order.

        Raises:
            ValueError: the range is not inside the span.
        """
        if not self.span.contains(byte_range):
            raise ValueError(f"{byte_range} is not inside {self.span}")
        parts: list[ByteRange] = []
        if byte_range.start == byte_range.end:
            return parts
        start = byte_range.start
        for piece in self._touching(byte_range):
            common = piece.byte_range.intersect(byte_range)
            assert common is not None
            if start < common.start:
                parts.append(ByteRange(start, common.start))
            if piece.again is None or common == piece.byte_range:
                parts.append(common)
            else:
                parts += piece.again.cut(common)
            start = common.end
        if start < byte_range.end:
            parts.append(ByteRange(start, byte_range.end))
        return parts

    def add(self, byte_range: ByteRange, value: int) -> None:
        """Take the CRC of one of the ranges that the last `cut` gave.

        Raises:
            ContradictionError: it differs from what came before.
            ValueError: the range reaches over the border of a piece.
        """
        if byte_range.start == byte_range.end:
            return
        touching = list(self._touching(byte_range))
        if not touching:
            if not self.span.contains(byte_range):
                raise ValueError(f"{byte_range} is not inside {self.span}")
            at = bisect_right(self._starts, byte_range.start)
            self._starts.insert(at, byte_range.start)
            self._pieces.insert(at, _Piece(byte_range, value))
            self._covered_bytes += byte_range.size_bytes
            return
        (piece, *more) = touching
        if more or not piece.byte_range.contains(byte_range):
            raise ValueError(f"{byte_range} reaches over a border at {piece.byte_range}")
        self._add_again(piece, byte_range, value)

    def missing(self) -> list[ByteRange]:
        """The ranges that did not come, in order."""
        gaps = []
        start = self.span.start
        for piece in self._pieces:
            if start < piece.byte_range.start:
                gaps.append(ByteRange(start, piece.byte_range.start))
            start = piece.byte_range.end
        if start < self.span.end:
            gaps.append(ByteRange(start, self.span.end))
        return gaps

    def uncompared(self) -> list[ByteRange]:
        """What must come again so that everything that came twice is compared, in order."""
        found: list[ByteRange] = []
        for piece in self._pieces:
            if piece.again is not None:
                found += sorted(piece.again.missing() + piece.again.uncompared())
        return found

    def value(self) -> int:
        """The CRC of the whole span.

        Raises:
            ValueError: something is missing.
        """
        if not self.is_complete:
            raise ValueError(f"{len(self.missing())} ranges of {self.span} are missing")
        value = 0
        for piece in self._pieces:
            value = combine(self._algorithm, value, piece.value, piece.byte_range.size_bytes)
        return value

    def _add_again(self, piece: _Piece, byte_range: ByteRange, value: int) -> None:
        if byte_range == piece.byte_range:
            self._compare(piece, value)
            return
        if piece.again is None:
            piece.again = Composed(self._algorithm, piece.byte_range)
        piece.again.add(byte_range, value)
        if piece.again.is_complete and not piece.again.uncompared():
            self._compare(piece, piece.again.value())
            piece.again = None

    @staticmethod
    def _compare(piece: _Piece, value: int) -> None:
        if value != piece.value:
            raise ContradictionError(piece.byte_range, piece.value, value)

    def _touching(self, byte_range: ByteRange) -> Iterator[_Piece]:
        """The pieces that hold bytes of the range, in order."""
        at = max(0, bisect_right(self._starts, byte_range.start) - 1)
        while at < len(self._pieces) and self._pieces[at].byte_range.start < byte_range.end:
            if self._pieces[at].byte_range.end > byte_range.start:
                yield self._pieces[at]
            at += 1
