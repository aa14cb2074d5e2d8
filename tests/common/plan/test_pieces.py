"""Every element of a copy comes exactly once, whatever the windows are."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.plan.geometry import Box, contiguous_strides
from fastload_common.plan.pieces import Piece, pieces


def elements(piece: Piece) -> list[tuple[int, int]]:
    """(source, destination) of each element of a piece."""
    found = []
    for index in itertools.product(*(range(n) for n in piece.sizes)):
        src = piece.src_offset + sum(i * s for i, s in zip(index, piece.src_strides, strict=True))
        dst = piece.dst_offset + sum(i * s for i, s in zip(index, piece.dst_strides, strict=True))
        found.append((src, dst))
    return found


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    sizes = tuple(draw(st.lists(st.integers(2, 4), min_size=0, max_size=4)))
    strides: list[int] = []
    span = 1
    for size in reversed(sizes):
        stride = span + draw(st.integers(0, 3))
        strides.insert(0, stride)
        span += (size - 1) * stride
    return Box(sizes, tuple(strides), contiguous_strides(sizes))


@settings(max_examples=400)
@given(boxes(), st.integers(0, 9), st.lists(st.integers(1, 17), min_size=1, max_size=60))
def test_windows_partition_a_copy(box: Box, offset: int, widths: list[int]) -> None:
    whole = elements(Piece(box.sizes, offset, box.src_strides, 100, box.dst_strides))
    end = max(src for src, _ in whole) + 1
    found: list[tuple[int, int]] = []
    start = 0
    for width in itertools.cycle(widths):
        if start >= end:
            break
        for piece in pieces(box, offset, 100, start, start + width):
            part = elements(piece)
            assert part
            assert all(start <= src < start + width for src, _ in part)
            found += part
        start += width
    assert sorted(found) == sorted(whole)


def test_a_window_that_holds_all_gives_one_piece() -> None:
    box = Box((3, 4), (10, 1), (4, 1))
    assert list(pieces(box, 5, 0, 0, 100)) == [Piece((3, 4), 5, (10, 1), 0, (4, 1))]


def test_rows_in_the_middle_come_as_one_piece() -> None:
    box = Box((100, 4), (10, 1), (4, 1))
    rows = list(pieces(box, 0, 0, 12, 902))
    assert [piece.sizes for piece in rows] == [(88, 4), (2,), (2,)]
