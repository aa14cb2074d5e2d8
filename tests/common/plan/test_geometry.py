"""Geometry against torch, which is its specification."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.plan.geometry import (
    View,
    contiguous_strides,
    dense_strides_like,
    nested,
    ordered,
    rebase,
    view_strides,
    views_overlap,
)

CELLS = 4096


def as_strided(view: View) -> torch.Tensor:
    return torch.arange(CELLS).as_strided(view.sizes, view.strides, view.offset)


@st.composite
def matrices(draw: st.DrawFn, allow_empty: bool = False) -> View:
    """A view made as engines make them: slices, transpositions and reshapes of a dense array."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    offset = draw(st.integers(0, 64))
    tensor = torch.arange(CELLS).as_strided(sizes, contiguous_strides(sizes), offset)
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(["slice", "permute", "select", "unsqueeze", "stride", "view"]))
        if step == "slice" and tensor.dim():
            dim = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, tensor.shape[dim] - (0 if allow_empty else 1)))
            shortest = 0 if allow_empty else 1
            length = draw(st.integers(shortest, max(shortest, tensor.shape[dim] - start)))
            tensor = tensor.narrow(dim, min(start, tensor.shape[dim] - length), length)
        elif step == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif step == "select" and tensor.dim() > 1 and tensor.shape[0]:
            tensor = tensor[draw(st.integers(0, tensor.shape[0] - 1))]
        elif step == "unsqueeze":
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
        elif step == "stride" and tensor.dim():
            tensor = tensor[:: draw(st.integers(1, 3))]
        elif step == "view" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        if tensor.numel() == 0 and not allow_empty:
            break
    return View(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@given(matrices(allow_empty=True))
def test_numel_and_span(view: View) -> None:
    tensor = as_strided(view)
    assert view.numel == tensor.numel()
    expected = int(tensor.max() - tensor.min()) + 1 if tensor.numel() else 0
    assert view.span == expected


@given(matrices())
def test_dense_strides_are_those_of_clone(view: View) -> None:
    tensor = as_strided(view)
    ours = dense_strides_like(view.sizes, view.strides)
    dense = torch.empty_strided(view.sizes, ours).copy_(tensor)
    assert dense.numel() == (torch.empty_strided(view.sizes, ours).untyped_storage().size() // 4)
    cloned = tensor.clone()
    for size, own, torchs in zip(view.sizes, ours, cloned.stride(), strict=True):
        assert size == 1 or own == torchs or not _dense(tensor)


def _dense(tensor: torch.Tensor) -> bool:
    view = View(tuple(tensor.shape), tuple(tensor.stride()), 0)
    return view.span == view.numel and nested(*ordered(*view[:2], view.strides)[:2])


@given(matrices(allow_empty=True), st.data())
def test_view_strides_are_those_of_view(view: View, data: st.DataObject) -> None:
    tensor = as_strided(view)
    sizes = list(tensor.shape)
    for _ in range(data.draw(st.integers(0, 3))):
        if len(sizes) > 1 and data.draw(st.booleans()):
            k = data.draw(st.integers(0, len(sizes) - 2))
            sizes[k : k + 2] = [sizes[k] * sizes[k + 1]]
        elif sizes:
            k = data.draw(st.integers(0, len(sizes) - 1))
            divisors = [d for d in range(1, sizes[k] + 1) if sizes[k] % d == 0] or [1]
            first = data.draw(st.sampled_from(divisors))
            sizes[k : k + 1] = [first, sizes[k] // first if sizes[k] else 0]
    ours = view_strides(view.sizes, view.strides, tuple(sizes))
    try:
        expected = tensor.view(sizes)
    except RuntimeError:
        assert ours is None
        return
    assert ours is not None
    actual = torch.arange(CELLS).as_strided(sizes, ours, view.offset)
    assert torch.equal(actual, expected)


@settings(max_examples=400)
@given(matrices(), matrices())
def test_overlap_is_never_missed_and_exact_for_one_run(a: View, b: View) -> None:
    truth = bool(set(as_strided(a).flatten().tolist()) & set(as_strided(b).flatten().tolist()))
    said = views_overlap(a, b)
    assert said or not truth
    if any(len(ordered(v.sizes, v.strides, v.strides).sizes) <= 1 for v in (a, b)):
        runs = [v for v in (a, b) if v.span == v.numel]
        if runs:
            assert said == truth


@given(st.data())
def test_overlap_is_exact_for_blocks_of_a_matrix(data: st.DataObject) -> None:
    rows, columns = 8, 12

    def block() -> View:
        top = data.draw(st.integers(0, rows - 1))
        left = data.draw(st.integers(0, columns - 1))
        height = data.draw(st.integers(1, rows - top))
        width = data.draw(st.integers(1, columns - left))
        return View((height, width), (columns, 1), top * columns + left)

    a, b = block(), block()
    truth = bool(set(as_strided(a).flatten().tolist()) & set(as_strided(b).flatten().tolist()))
    assert views_overlap(a, b) == truth


@settings(max_examples=400)
@given(matrices(), st.data())
def test_rebase_shows_the_same_elements(base: View, data: st.DataObject) -> None:
    source = as_strided(base)
    dense_strides = dense_strides_like(base.sizes, base.strides)
    if data.draw(st.booleans()):
        dense_strides = contiguous_strides(base.sizes)
    dense = torch.empty_strided(base.sizes, dense_strides, dtype=torch.int64).copy_(source)
    looked = dense
    for _ in range(data.draw(st.integers(0, 3))):
        if looked.dim() and data.draw(st.booleans()):
            dim = data.draw(st.integers(0, looked.dim() - 1))
            start = data.draw(st.integers(0, looked.shape[dim] - 1))
            looked = looked.narrow(dim, start, data.draw(st.integers(1, looked.shape[dim] - start)))
        elif looked.is_contiguous():
            looked = looked.view(-1)
        else:
            looked = looked.permute(*reversed(range(looked.dim())))
    view = View(tuple(looked.shape), tuple(looked.stride()), int(looked.storage_offset()))
    rebased = rebase(view, base.sizes, dense_strides, base)
    if rebased is not None:
        assert as_strided(rebased).flatten().tolist() == looked.flatten().tolist()


def test_rebase_splits_whole_turns() -> None:
    # (2, 3, 4) copied out of a permuted array, then seen flat.
    base = View((2, 3, 4), (4, 8, 1), 0)
    flat = rebase(View((24,), (1,), 0), (2, 3, 4), (12, 4, 1), base)
    assert flat == View((2, 3, 4), (4, 8, 1), 0)
    assert rebase(View((10,), (1,), 2), (2, 3, 4), (12, 4, 1), base) is None


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((4, 3), (3, 1), True),
        ((4, 3), (2, 1), False),
        ((4,), (0,), False),
        ((), (), True),
        ((5, 4), (1, 1), False),
    ],
)
def test_nested(sizes: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert nested(sizes, strides) is expected


@given(matrices())
def test_ordered_keeps_the_elements(view: View) -> None:
    box = ordered(view.sizes, view.strides, view.strides)
    assert math.prod(box.sizes) == view.numel
    assert list(box.src_strides) == sorted(box.src_strides, reverse=True)
    again = as_strided(View(box.sizes, box.src_strides, view.offset))
    assert sorted(again.flatten().tolist()) == sorted(as_strided(view).flatten().tolist())
