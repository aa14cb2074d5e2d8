"""How pieces cross: which bytes, and in how many calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.plan.geometry import ordered
from fastload_common.plan.pieces import Piece
from fastload_common.staging import route as routes
from fastload_common.staging.route import Dense, Rows, Run, Spread, dense, route, tables


def piece(sizes: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...]) -> Piece:
    box = ordered(sizes, src, dst)
    return Piece(box.sizes, 5, box.src_strides, 9, box.dst_strides)


def test_a_slice_of_rows_is_one_run() -> None:
    assert route(piece((128, 512), (512, 1), (512, 1)), 2, same_dtype=True) == Run(128 * 512 * 2)


def test_one_element_is_a_run() -> None:
    assert route(piece((1, 1), (7, 1), (3, 1)), 4, same_dtype=True) == Run(4)


def test_a_slice_of_columns_is_rows_in_one_call() -> None:
    columns = piece((128, 512), (4096, 1), (512, 1))
    assert route(columns, 2, same_dtype=True) == Rows()
    [table] = tables(columns)
    assert (table.rows, table.width, table.src_stride, table.dst_stride) == (128, 512, 4096, 512)
    assert (table.src_offset, table.dst_offset) == (5, 9)


def test_columns_of_experts_are_one_call_each() -> None:
    experts = piece((3, 128, 512), (128 * 4096, 4096, 1), (1000 * 512, 512, 1))
    assert route(experts, 2, same_dtype=True) == Rows()
    assert [table.src_offset - 5 for table in tables(experts)] == [0, 128 * 4096, 2 * 128 * 4096]
    assert [table.dst_offset - 9 for table in tables(experts)] == [0, 512000, 1024000]


@pytest.mark.parametrize(
    ("sizes", "src", "dst", "same_dtype"),
    [
        ((128, 512), (512, 1), (512, 1), False),  # a cast
        ((128, 512), (512, 1), (1, 128), True),  # a transpose
        ((128, 512), (1024, 2), (512, 1), True),  # every other column
        ((4096, 16), (32, 1), (16, 1), True),  # rows of 32 bytes
        ((100, 4, 512), (4096, 600, 1), (2048, 512, 1), True),  # too many calls
    ],
)
def test_the_rest_is_put_in_place_on_the_device(
    sizes: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...], same_dtype: bool
) -> None:
    assert isinstance(route(piece(sizes, src, dst), 2, same_dtype=same_dtype), Spread)


def test_no_bytes_cross_for_nothing_where_most_of_them_are_not_needed() -> None:
    eighth = piece((128, 512), (4096, 1), (512, 1))
    assert route(eighth, 2, same_dtype=False) == Dense()
    half = piece((128, 512), (1024, 1), (512, 1))
    assert isinstance(route(half, 2, same_dtype=False), Spread)


def test_rows_too_far_apart_for_the_copy_engine_are_spread() -> None:
    far = piece((2, 512), (1 << 31, 1), (512, 1))
    assert isinstance(route(far, 1, same_dtype=True), Dense | Spread)


boxes = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.integers(0, 3),
    st.booleans(),
)


@given(boxes)
def test_every_way_brings_the_same_elements(
    drawn: tuple[list[int], list[int], int, bool],
) -> None:
    sizes, order, pad, same_dtype = drawn
    src = _strides(sizes, range(len(sizes)), pad)
    dst = _strides(sizes, [d for d in order if d < len(sizes)], 0)
    box = ordered(tuple(sizes), src, dst)
    one = Piece(box.sizes, 0, box.src_strides, 0, box.dst_strides)
    memory = np.arange(10_000)
    wanted = np.full(10_000, -1)
    _view(wanted, one.sizes, one.dst_strides)[...] = _view(memory, one.sizes, one.src_strides)
    got = np.full(10_000, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "SHORTEST_ROW_BYTES", 2)
        way = route(one, 1, same_dtype=same_dtype)
    if isinstance(way, Run):
        got[: way.size_bytes] = memory[: way.size_bytes]
    elif isinstance(way, Rows):
        _bring(got, memory, one)
    elif isinstance(way, Dense):
        between = np.full(10_000, -1)
        packed = dense(one, 3)
        _bring(between, memory, packed)
        _view(got, one.sizes, one.dst_strides)[...] = _view(
            between[3:], packed.sizes, packed.dst_strides
        )
    else:
        raw = memory[: way.span_bytes]
        _view(got, one.sizes, one.dst_strides)[...] = _view(raw, one.sizes, one.src_strides)
    assert (got == wanted).all()


def _bring(target: np.ndarray, source: np.ndarray, one: Piece) -> None:
    for table in tables(one):
        shape = (table.rows, table.width)
        rows = _view(source[table.src_offset :], shape, (table.src_stride, 1))
        _view(target[table.dst_offset :], shape, (table.dst_stride, 1))[...] = rows


def _strides(sizes: list[int], order: object, pad: int) -> tuple[int, ...]:
    strides = [0] * len(sizes)
    step = 1
    for dim in reversed(list(order)):  # type: ignore[call-overload]
        strides[dim] = step
        step *= sizes[dim] + pad
    return tuple(strides)


def _view(memory: np.ndarray, sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(
        memory, sizes, tuple(stride * memory.itemsize for stride in strides)
    )
