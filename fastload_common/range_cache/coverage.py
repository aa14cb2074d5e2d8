"""Which parts of one object are held, and from which pieces a range can be put together. No I/O."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from fastload_common.range_cache.records import BLOCK_BYTES, Piece
from fastload_common.ranges import ByteRange

__all__ = ["Cover", "Coverage", "Held"]


@dataclass(frozen=True, slots=True)
class Held:
    """A part of a range that one read brings.

    Attributes:
        pieces: each begins where the one before it ends; all but the first are whole blocks, so
            that their checksums join at little cost.
        wanted: the part, inside of what the pieces span.
    """

    pieces: tuple[Piece, ...]
    wanted: ByteRange

    @property
    def span(self) -> ByteRange:
        return ByteRange(self.pieces[0].start, self.pieces[-1].end)


@dataclass(frozen=True, slots=True)
class Cover:
    """What is held of a range, and what is not. Both in order."""

    held: tuple[Held, ...]
    missing: tuple[ByteRange, ...]


class Coverage:
    """The pieces of one object. For any thread.

    Pieces may overlap: they are of the same bytes.

    Args:
        usable: the numbers of the algorithms that can be computed here; others count for nothing.
    """

    def __init__(self, usable: frozenset[int]) -> None:
        self._usable = usable
        self._lock = threading.Lock()
        self._blocks: dict[int, list[Piece]] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take records, in the order in which they were written."""
        with self._lock:
            for piece in pieces:
                if not piece.algorithm:
                    self._drop(piece.start, piece.end)
                elif piece.algorithm in self._usable:
                    block = self._blocks.setdefault(piece.start // BLOCK_BYTES, [])
                    block[:] = [p for p in block if p[:2] != piece[:2]]
                    block.append(piece)

    def drop(self, byte_range: ByteRange) -> None:
        """Forget all pieces that hold bytes of a range."""
        with self._lock:
            self._drop(byte_range.start, byte_range.end)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()

    def cover(self, byte_range: ByteRange) -> Cover:
        """Put a range together from as few pieces as may be."""
        held: list[Held] = []
        missing: list[ByteRange] = []
        run: list[Piece] = []
        run_start = at = byte_range.start
        with self._lock:
            while at < byte_range.end:
                piece = self._best(at)
                if run and (piece is None or not _joins(run[-1], piece)):
                    held.append(Held(tuple(run), ByteRange(run_start, at)))
                    run = []
                if piece is None:
                    end = self._next_start(at, byte_range.end)
                    missing.append(ByteRange(at, end))
                    at = end
                    continue
                if not run:
                    run_start = at
                run.append(piece)
                at = min(piece.end, byte_range.end)
        if run:
            held.append(Held(tuple(run), ByteRange(run_start, at)))
        return Cover(tuple(held), tuple(missing))

    @property
    def pieces(self) -> list[Piece]:
        """All of them, in order."""
        with self._lock:
            return sorted(piece for block in self._blocks.values() for piece in block)

    @property
    def held_bytes(self) -> int:
        """Of the object, each byte once."""
        total = end = 0
        for piece in self.pieces:
            total += max(0, piece.end - max(piece.start, end))
            end = max(end, piece.end)
        return total

    def _best(self, at: int) -> Piece | None:
        """Of the pieces that hold the byte the one that reaches farthest."""
        block = self._blocks.get(at // BLOCK_BYTES, ())
        found = [piece for piece in block if piece.start <= at < piece.end]
        return max(found, key=lambda piece: piece.end, default=None)

    def _next_start(self, at: int, end: int) -> int:
        """Where the next piece begins; at most the end."""
        for number in range(at // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
            starts = [p.start for p in self._blocks.get(number, ()) if p.start > at]
            if starts:
                return min(min(starts), end)
        return end

    def _drop(self, start: int, end: int) -> None:
        for number in range(start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1):
            block = self._blocks.get(number)
            if block is not None:
                block[:] = [p for p in block if p.start >= end or p.end <= start]


def _joins(last: Piece, piece: Piece) -> bool:
    is_whole = piece.end - piece.start == BLOCK_BYTES
    return last.end == piece.start and is_whole and last.algorithm == piece.algorithm
