"""The needs of a rank: what they hold, and that a message of them is the same or refused."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.plan.extents import MOST_SPANS
from fastload_common.plan.geometry import View
from fastload_common.plan.needs import Needs
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId

OBJECTS = [ObjectId(f"s3://b/{name}", '"1"', 1 << 20) for name in "abc"]
HEAD = struct.Struct("<4sIQQ")


def rows(needs: Needs) -> list[list[list[int]]]:
    return [spans.tolist() for spans in needs.spans]


def made_of(spans: list[list[tuple[int, int]]], needed_bytes: int = 0) -> Needs:
    return Needs(
        tuple(np.array(rows, dtype=np.int64).reshape(-1, 2) for rows in spans), needed_bytes
    )


@st.composite
def needs_of(draw: st.DrawFn, objects: int = 3) -> Needs:
    """Any needs: ascending spans with at least a byte between two."""
    spans, covered_bytes = [], 0
    for _ in range(objects):
        numbers = draw(st.sets(st.integers(0, 1 << 40), max_size=12))
        borders = sorted(numbers)[: len(numbers) // 2 * 2]
        pairs = list(zip(borders[::2], borders[1::2], strict=True))
        covered_bytes += sum(end - start for start, end in pairs)
        spans.append(pairs)
    return made_of(spans, draw(st.integers(0, covered_bytes)))


def test_needs_are_the_spans_of_the_reads_by_object() -> None:
    column = View((3, 2), (10, 1), 4)
    reads = [
        TensorRead(OBJECTS[2], 100, 2, column),
        TensorRead(OBJECTS[0], 0, 1, View((50,), (1,), 0)),
        TensorRead(OBJECTS[0], 0, 1, View((50,), (1,), 0)),  # tied: the same bytes once
        TensorRead(OBJECTS[0], 50, 1, View((0, 5), (5, 1), 0)),
    ]
    needs = Needs.of(reads, OBJECTS, gap_bytes=0)
    assert rows(needs) == [[[0, 50]], [], [[108, 112], [128, 132], [148, 152]]]
    assert needs.needed_bytes == 50 + 12
    merged = Needs.of(reads, OBJECTS, gap_bytes=16)
    assert rows(merged) == [[[0, 50]], [], [[108, 152]]]
    assert merged.needed_bytes == 50 + 12


def test_a_read_of_an_object_that_was_not_agreed_is_an_error() -> None:
    read = TensorRead(OBJECTS[1], 0, 1, View((5,), (1,), 0))
    with pytest.raises(ValueError, match="s3://b/b is not among the agreed objects"):
        Needs.of([read], OBJECTS[:1], gap_bytes=0)


def test_millions_of_runs_are_merged_to_what_a_message_may_hold() -> None:
    comb = View((100_000, 4), (1000, 1), 0)
    reads = [TensorRead(OBJECTS[0], k << 40, 1, comb) for k in range(20)]
    needs = Needs.of(reads, OBJECTS, gap_bytes=0)
    assert sum(map(len, needs.spans)) == 20
    assert needs.needed_bytes == 20 * 400_000


@given(needs_of())
def test_a_message_says_the_same(needs: Needs) -> None:
    again = Needs.decode(needs.encode(), 3)
    assert rows(again) == rows(needs)
    assert again.needed_bytes == needs.needed_bytes


def test_a_message_of_nothing() -> None:
    empty = Needs.of([], OBJECTS, gap_bytes=0)
    again = Needs.decode(empty.encode(), 3)
    assert rows(again) == [[], [], []]
    assert Needs.decode(made_of([]).encode(), 0).spans == ()


def test_a_message_of_many_slices_is_small() -> None:
    slices = [(k * 3_145_728, k * 3_145_728 + 393_216) for k in range(60_000)]
    assert len(made_of([slices]).encode()) < 60_000


@settings(max_examples=300)
@given(needs_of(), st.data())
def test_a_damaged_message_is_refused_or_is_needs(needs: Needs, data: st.DataObject) -> None:
    message = bytearray(needs.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = Needs.decode(bytes(message[: data.draw(st.integers(0, len(message)))]), 3)
    except ValueError:
        return
    check(found)


@settings(max_examples=300)
@given(
    st.lists(st.integers(-1, 3), min_size=2, max_size=2),
    st.lists(
        st.sampled_from([0, 1, 2, 5, -1, -(1 << 63), (1 << 63) - 1, 1 << 61, 1 << 60]), max_size=8
    ),
    st.integers(0, 5),
    st.integers(0, 20),
)
def test_any_numbers_in_a_message_are_refused_or_are_needs(
    counts: list[int], deltas: list[int], spans: int, needed_bytes: int
) -> None:
    try:
        found = Needs.decode(message_of(counts, deltas, spans, needed_bytes), 2)
    except ValueError:
        return
    check(found)
    assert sum(map(len, found.spans)) == spans == sum(counts)


def message_of(counts: list[int], deltas: list[int], spans: int, needed_bytes: int) -> bytes:
    numbers = np.array([*counts, *deltas], dtype="<i8")
    planes = numbers.view(np.uint8).reshape(-1, 8).T.tobytes()
    return HEAD.pack(b"FLN1", len(counts), spans, needed_bytes) + zlib.compress(planes)


def check(needs: Needs) -> None:
    """What `decode` promises of anything that it takes."""
    total = 0
    for spans in rows(needs):
        borders = [border for span in spans for border in span]
        assert borders == sorted(set(borders))
        assert all(0 <= border < 1 << 62 for border in borders)
        total += sum(end - start for start, end in spans)
    assert 0 <= needs.needed_bytes <= total


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "less than their head"),
        (HEAD.pack(b"XXXX", 1, 0, 0), "begin with"),
        (HEAD.pack(b"FLN1", 2, 0, 0) + zlib.compress(bytes(16)), "1 were agreed"),
        (HEAD.pack(b"FLN1", 1, MOST_SPANS + 1, 0), "1 were agreed"),
        (HEAD.pack(b"FLN1", 1, 1, 0) + b"no zlib", "cannot be unpacked"),
        (HEAD.pack(b"FLN1", 1, 1, 0) + zlib.compress(bytes(1 << 20)), "do not unpack to 24"),
        (HEAD.pack(b"FLN1", 1, 1, 0) + zlib.compress(bytes(24))[:-1], "do not unpack to 24"),
        (message_of([1], [0, 5], 1, 0) + b"more", "do not unpack to 24"),
        (message_of([2], [0, 5], 1, 0), "counts"),
        (message_of([1], [0, 0], 1, 0), "not ascending"),
        (message_of([2], [0, 5, 0, 5], 2, 0), "not ascending"),
        (message_of([1], [-1, 5], 1, 0), "not ascending"),
        (message_of([1], [1 << 61, 5], 1, 0), "not of this world"),
        (message_of([1], [0, 5], 1, 6), "6 bytes in spans of 5"),
    ],
)
def test_what_is_no_message_of_needs_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Needs.decode(message, 1)


def test_more_reads_than_spans_are_merged_until_others_take_them() -> None:
    far = [ObjectId(f"s3://b/{name}", '"1"', 1 << 40) for name in "ab"]
    view = View((100,), (1,), 0)
    count = MOST_SPANS + 1
    reads = [TensorRead(far[k % 2], k * 1000, 1, view) for k in range(count)]
    needs = Needs.of(reads, far, gap_bytes=0)
    assert 0 < sum(map(len, needs.spans)) <= MOST_SPANS
    assert [int(spans[0, 0]) for spans in needs.spans] == [0, 1000]
    assert max(int(spans[-1, 1]) for spans in needs.spans) == (count - 1) * 1000 + 100
    assert needs.needed_bytes == count * 100
    again = Needs.decode(needs.encode(), 2)
    assert rows(again) == rows(needs)
