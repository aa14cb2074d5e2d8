"""Pieces in any order, twice, and cut elsewhere: the CRC of the whole, or a contradiction."""

from __future__ import annotations

import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.checksums.algorithms import CRC32
from fastload_common.checksums.composed import Composed, ContradictionError
from fastload_common.ranges import ByteRange

DATA = bytes((i * 31 + i // 7) % 256 for i in range(1000))


def take(composed: Composed, start: int, end: int, data: bytes = DATA) -> list[ByteRange]:
    """What a reader of a range does; returns what it was cut to."""
    parts = composed.cut(ByteRange(start, end))
    for part in parts:
        composed.add(part, zlib.crc32(data[part.start : part.end]))
    return parts


def whole(size_bytes: int = 1000) -> Composed:
    return Composed(CRC32, ByteRange(0, size_bytes))


def spans(ranges: list[ByteRange]) -> list[tuple[int, int]]:
    return [(r.start, r.end) for r in ranges]


def flipped(at: int) -> bytes:
    data = bytearray(DATA)
    data[at] ^= 1
    return bytes(data)


@given(cuts=st.sets(st.integers(1, 999), max_size=20), shuffled=st.randoms(use_true_random=False))
def test_pieces_in_any_order(cuts: set[int], shuffled: object) -> None:
    pieces = list(pairwise([0, *sorted(cuts), 1000]))
    shuffled.shuffle(pieces)  # type: ignore[attr-defined]
    composed = whole()
    for start, end in pieces:
        assert not composed.is_complete
        assert spans(take(composed, start, end)) == [(start, end)]
    assert composed.is_complete
    assert composed.value() == zlib.crc32(DATA)


_SPAN = st.tuples(st.integers(0, 999), st.integers(1, 1000)).filter(lambda s: s[0] < s[1])


@given(reads=st.lists(_SPAN, max_size=12), wrong=st.none() | st.tuples(st.integers(0, 11), _SPAN))
def test_against_an_oracle_of_bytes(
    reads: list[tuple[int, int]], wrong: tuple[int, tuple[int, int]] | None
) -> None:
    """Any reads, one of them with a wrong byte: the end is complete and right, or it is told."""
    number, (at, _) = wrong or (-1, (0, 0))
    seen = bytearray(1000)
    used_wrong = False
    composed = whole()
    try:
        for k, (start, end) in enumerate(reads):
            hit = k == number and start <= at < end
            used_wrong |= hit
            take(composed, start, end, flipped(at) if hit else DATA)
            seen[start:end] = b"\1" * (end - start)
        expected = [k for k in range(1000) if not seen[k]]
        assert [k for r in composed.missing() for k in range(r.start, r.end)] == expected
        assert composed.is_complete == (not expected)
        for gap in composed.missing():
            take(composed, gap.start, gap.end)
        while again := composed.uncompared():
            for part in again:
                take(composed, part.start, part.end)
    except ContradictionError:
        assert used_wrong
        return
    assert composed.is_complete
    assert (composed.value() != zlib.crc32(DATA)) == used_wrong


def test_what_is_missing() -> None:
    composed = whole()
    assert spans(composed.missing()) == [(0, 1000)]
    take(composed, 100, 200)
    take(composed, 300, 1000)
    assert spans(composed.missing()) == [(0, 100), (200, 300)]
    with pytest.raises(ValueError, match="2 ranges of"):
        composed.value()


def test_an_object_without_bytes_is_complete() -> None:
    composed = whole(0)
    assert composed.is_complete
    assert composed.value() == 0
    assert composed.cut(ByteRange(0, 0)) == []


def test_a_larger_range_is_cut_around_what_is_there() -> None:
    composed = whole()
    take(composed, 100, 104)
    take(composed, 300, 400)
    parts = take(composed, 0, 350)
    assert spans(parts) == [(0, 100), (100, 104), (104, 300), (300, 350)]
    assert spans(composed.uncompared()) == [(350, 400)]


def test_no_bytes_are_no_piece() -> None:
    composed = whole()
    take(composed, 100, 200)
    for at in (0, 100, 150, 200, 1000):
        assert take(composed, at, at) == []
        composed.add(ByteRange(at, at), 0)
    assert spans(composed.missing()) == [(0, 100), (200, 1000)]


def test_the_same_bytes_again_are_compared() -> None:
    composed = whole()
    take(composed, 0, 500)
    take(composed, 0, 500)
    with pytest.raises(ContradictionError) as caught:
        take(composed, 0, 500, flipped(77))
    assert caught.value.byte_range == ByteRange(0, 500)
    assert caught.value.first == zlib.crc32(DATA[:500])
    assert caught.value.again == zlib.crc32(flipped(77)[:500])


def test_parts_that_come_again_are_compared_when_all_are_there() -> None:
    composed = whole()
    take(composed, 0, 500)
    take(composed, 300, 500)
    take(composed, 0, 100, flipped(50))
    assert spans(composed.uncompared()) == [(100, 300)]
    with pytest.raises(ContradictionError):
        take(composed, 100, 300)
    composed = whole()
    for start, end in ((0, 500), (300, 500), (0, 100), (100, 300)):
        take(composed, start, end)
    assert composed.uncompared() == []


def test_what_it_was_not_asked_for_is_refused() -> None:
    composed = Composed(CRC32, ByteRange(100, 200))
    composed.add(ByteRange(100, 150), 1)
    for start, end in ((140, 160), (90, 120)):
        with pytest.raises(ValueError, match="over a border"):
            composed.add(ByteRange(start, end), 1)
    for start, end in ((0, 10), (180, 210)):
        with pytest.raises(ValueError, match="not inside"):
            composed.add(ByteRange(start, end), 1)
        with pytest.raises(ValueError, match="not inside"):
            composed.cut(ByteRange(start, end))
