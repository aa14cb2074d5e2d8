"""Which part of a copy a window of the source brings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastload_common.plan.geometry import Box

__all__ = ["Piece", "pieces"]


class Piece(NamedTuple):
    """A box that is complete inside the window; offsets and strides in elements."""

    sizes: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    dst_offset: int
    dst_strides: tuple[int, ...]


def pieces(box: Box, src_offset: int, dst_offset: int, start: int, end: int) -> Iterator[Piece]:
    """Cut a copy to the window ``[start, end)`` of the source, in elements.

    Args:
        box: dimensions from `ordered`, nested on the source side, no size 0.
        src_offset: element of the source where the box begins.
        dst_offset: element of the destination where the box begins.

    Yields:
        Boxes, at most two partial ones for each dimension and one whole. Over a partition of
        the source into windows each element is yielded exactly once.
    """
    span = 1 + sum((n - 1) * s for n, s in zip(box.sizes, box.src_strides, strict=True))
    if src_offset >= end or src_offset + span <= start:
        return
    if start <= src_offset and src_offset + span <= end:
        yield Piece(box.sizes, src_offset, box.src_strides, dst_offset, box.dst_strides)
        return
    size, src, dst = box.sizes[0], box.src_strides[0], box.dst_strides[0]
    inner = Box(box.sizes[1:], box.src_strides[1:], box.dst_strides[1:])
    inner_span = span - (size - 1) * src
    # Steps that touch the window, and among them those that lie in it whole.
    first = max(0, -(-(start - src_offset - inner_span + 1) // src))
    last = min(size - 1, (end - 1 - src_offset) // src)
    whole_first = max(first, -(-(start - src_offset) // src))
    whole_last = min(last, (end - inner_span - src_offset) // src)
    if whole_first > whole_last:
        partial = range(first, last + 1)
    else:
        count = whole_last - whole_first + 1
        yield Piece(
            (count, *inner.sizes),
            src_offset + whole_first * src,
            box.src_strides,
            dst_offset + whole_first * dst,
            box.dst_strides,
        )
        partial = (*range(first, whole_first), *range(whole_last + 1, last + 1))  # type: ignore[assignment]
    for step in partial:
        yield from pieces(inner, src_offset + step * src, dst_offset + step * dst, start, end)
