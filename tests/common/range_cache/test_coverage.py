"""What is held of a range, beside an oracle that knows each byte."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fastload_common.range_cache.coverage import Coverage
from fastload_common.range_cache.records import BLOCK_BYTES, Piece
from fastload_common.ranges import ByteRange

BLOCKS = 4
# Borders at and beside those of blocks, so that a few examples meet all cases.
_PLACES = sorted({k * BLOCK_BYTES // 4 + d for k in range(4 * BLOCKS + 1) for d in (-1, 0, 1)})
PLACES = st.sampled_from([p for p in _PLACES if 0 <= p <= BLOCKS * BLOCK_BYTES])
RANGES = st.tuples(PLACES, PLACES).map(sorted).filter(lambda r: r[0] < r[1])


def cut(start: int, end: int) -> list[Piece]:
    pieces = []
    while start < end:
        stop = min(start - start % BLOCK_BYTES + BLOCK_BYTES, end)
        pieces.append(Piece(start, stop, 1, start))
        start = stop
    return pieces


def marks(ranges: list[ByteRange]) -> set[int]:
    """A range as the set of elementary steps between places."""
    steps = list(pairwise(_PLACES))
    return {a for a, b in steps for r in ranges if r.start <= a and b <= r.end}


@given(held=st.lists(RANGES, max_size=6), dropped=st.lists(RANGES, max_size=2), asked=RANGES)
def test_cover_says_what_is_held_and_what_is_not(
    held: list[list[int]], dropped: list[list[int]], asked: list[int]
) -> None:
    coverage = Coverage(frozenset({1}))
    pieces: list[Piece] = []
    for start, end in held:
        coverage.add(cut(start, end))
        pieces += cut(start, end)
    for start, end in dropped:
        coverage.drop(ByteRange(start, end))
        pieces = [p for p in pieces if p.end <= start or p.start >= end]
    assert coverage.pieces == sorted(set(pieces))
    truth = marks([ByteRange(p.start, p.end) for p in pieces])
    wanted = ByteRange(*asked)
    cover = coverage.cover(wanted)
    parts = sorted([*cover.missing, *(h.wanted for h in cover.held)])
    # In order, without a gap and without an overlap.
    assert parts[0].start == wanted.start
    assert parts[-1].end == wanted.end
    assert all(a.end == b.start for a, b in pairwise(parts))
    assert marks(list(cover.missing)) == marks([wanted]) - truth
    for part in cover.held:
        assert part.span.contains(part.wanted)
        assert all(piece in pieces for piece in part.pieces)
        for one, other in pairwise(part.pieces):
            assert one.end == other.start
            assert other.end - other.start == BLOCK_BYTES
    assert coverage.held_bytes == sum(b - a for a, b in pairwise(_PLACES) if a in truth)


def test_a_record_without_a_checksum_takes_back_what_came_before_it() -> None:
    coverage = Coverage(frozenset({1}))
    coverage.add([Piece(0, 10, 1, 5), Piece(20, 30, 1, 5), Piece(5, 6, 0, 0), Piece(2, 4, 1, 7)])
    assert coverage.pieces == [Piece(2, 4, 1, 7), Piece(20, 30, 1, 5)]


def test_the_later_of_two_records_of_a_range_counts() -> None:
    coverage = Coverage(frozenset({1}))
    coverage.add([Piece(0, 10, 1, 5), Piece(0, 10, 1, 6)])
    assert coverage.pieces == [Piece(0, 10, 1, 6)]


def test_checksums_that_cannot_be_computed_here_count_for_nothing() -> None:
    coverage = Coverage(frozenset({2}))
    coverage.add([Piece(0, 10, 1, 5)])
    assert coverage.cover(ByteRange(0, 10)).missing == (ByteRange(0, 10),)
