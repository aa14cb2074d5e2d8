"""Byte ranges: half-open, never negative, against sets of integers as the oracle."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.ranges import ByteRange, ObjectId


@st.composite
def byte_ranges(draw: st.DrawFn) -> ByteRange:
    start = draw(st.integers(0, 30))
    return ByteRange(start, start + draw(st.integers(0, 30)))


def positions(byte_range: ByteRange) -> set[int]:
    return set(range(byte_range.start, byte_range.end))


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (3, 2), (-2, -1)])
def test_nonsense_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="not a byte range"):
        ByteRange(start, end)


def test_size_and_text() -> None:
    assert ByteRange(3, 3).size_bytes == 0
    assert ByteRange(3, 10).size_bytes == 7
    assert str(ByteRange(3, 10)) == "[3, 10)"


@given(byte_ranges(), byte_ranges())
def test_intersection_is_that_of_the_positions(a: ByteRange, b: ByteRange) -> None:
    common = a.intersect(b)
    assert (positions(common) if common else set()) == positions(a) & positions(b)
    assert common == b.intersect(a)
    assert common is None or common.size_bytes > 0


@given(byte_ranges(), byte_ranges())
def test_contains_is_subset(a: ByteRange, b: ByteRange) -> None:
    if b.size_bytes:
        assert a.contains(b) == (positions(b) <= positions(a))
    if a.contains(b):
        assert positions(b) <= positions(a)


def test_ranges_sort_by_start_and_are_hashable() -> None:
    ranges = [ByteRange(5, 6), ByteRange(0, 9), ByteRange(0, 2)]
    assert sorted(ranges) == [ByteRange(0, 2), ByteRange(0, 9), ByteRange(5, 6)]
    assert len({ByteRange(1, 2), ByteRange(1, 2)}) == 1


def test_identities_travel_between_processes() -> None:
    object_id = ObjectId("s3://b/k", '"etag"', 10)
    assert pickle.loads(pickle.dumps(object_id)) == object_id
    assert object_id != ObjectId("s3://b/k", '"other"', 10)


@pytest.mark.parametrize(
    ("etag", "is_one"),
    [('"e"', True), ("e", True), ("sha256:ab+7", True), ("W", True)]
    + [(etag, False) for etag in (None, "", '""', ' "" ', 'W/"e"', 'W/""', ' W/"e"')],
)
def test_an_empty_or_weak_etag_tells_no_states_apart(etag: str | None, is_one: bool) -> None:
    assert ObjectId("s3://b/k", etag, 1).is_one_state == is_one
