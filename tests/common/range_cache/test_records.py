"""The journal: what survives damage, and what never counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.range_cache.records import BLOCK_BYTES, Piece, forgotten, pack, unpack
from fastload_common.ranges import ByteRange

KEY = "k" * 40
SIZE_BYTES = 10 * BLOCK_BYTES
PIECES = [
    Piece(0, BLOCK_BYTES, 1, 1 << 63),
    Piece(BLOCK_BYTES, BLOCK_BYTES + 7, 2, 5),
    Piece(3 * BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 2, 1, 0),
]


def test_what_is_packed_comes_back() -> None:
    data = pack(KEY, PIECES)
    assert unpack(KEY, data, SIZE_BYTES) == (PIECES, len(data))
    assert unpack(KEY, data + data, SIZE_BYTES) == (PIECES * 2, 2 * len(data))
    assert unpack(KEY, b"", SIZE_BYTES) == ([], 0)


def test_many_records_are_several_frames() -> None:
    pieces = [Piece(k, k + 1, 1, k) for k in range(70_000)]
    assert unpack(KEY, pack(KEY, pieces), SIZE_BYTES)[0] == pieces


def test_the_journal_of_another_object_counts_for_nothing() -> None:
    assert unpack("x" * 40, pack(KEY, PIECES), SIZE_BYTES) == ([], 0)


@given(cut=st.integers(0, 200), junk=st.binary(max_size=50))
def test_a_torn_frame_costs_itself_only(cut: int, junk: bytes) -> None:
    frames = [pack(KEY, [piece]) for piece in PIECES]
    torn = frames[1][: min(cut, len(frames[1]) - 1)]
    found, _ = unpack(KEY, frames[0] + torn + junk + frames[2], SIZE_BYTES)
    assert found == [PIECES[0], PIECES[2]]


@given(at=st.integers(0, 119), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_its_frame_only(at: int, bit: int) -> None:
    frames = [pack(KEY, [piece]) for piece in PIECES]
    data = bytearray(b"".join(frames))
    data[at] ^= 1 << bit
    found, _ = unpack(KEY, bytes(data), SIZE_BYTES)
    assert found == [p for k, p in enumerate(PIECES) if k != at // len(frames[0])]


def test_the_end_is_that_of_the_last_good_frame() -> None:
    """What is being written just now is read the next time."""
    frame = pack(KEY, PIECES)
    found, end = unpack(KEY, frame + frame[:-1], SIZE_BYTES)
    assert (found, end) == (PIECES, len(frame))
    assert unpack(KEY, (frame + frame)[end:], SIZE_BYTES) == (PIECES, len(frame))


@pytest.mark.parametrize(
    "piece",
    [
        Piece(5, 5, 1, 0),
        Piece(0, BLOCK_BYTES + 1, 1, 0),
        Piece(BLOCK_BYTES - 1, BLOCK_BYTES + 1, 1, 0),
        Piece(SIZE_BYTES - 1, SIZE_BYTES + 1, 1, 0),
        Piece((1 << 63) + 5, (1 << 63) + 6, 1, 0),
    ],
    ids=["empty", "long", "over a border", "beyond the end", "nowhere"],
)
def test_records_that_cannot_be_count_for_nothing(piece: Piece) -> None:
    assert unpack(KEY, pack(KEY, [piece]), SIZE_BYTES)[0] == []


def test_what_is_forgotten_is_named_in_steps_of_a_block() -> None:
    rows = forgotten(ByteRange(5, 2 * BLOCK_BYTES + 6))
    assert [(row.start, row.end) for row in rows] == [
        (5, BLOCK_BYTES + 5),
        (BLOCK_BYTES + 5, 2 * BLOCK_BYTES + 5),
        (2 * BLOCK_BYTES + 5, 2 * BLOCK_BYTES + 6),
    ]
    assert unpack(KEY, pack(KEY, rows), SIZE_BYTES)[0] == rows
