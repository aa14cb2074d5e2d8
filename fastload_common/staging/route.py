"""How one piece of a copy crosses to a device: which runs of bytes, and in which shape. Pure.

A piece goes one of three ways:

- *run*: one run of bytes on both sides;
- *rows*: equal runs at equal distances on both sides, as in a slice of a matrix's columns: only
  those bytes cross;
- *spread*: everything else (casts, transposes, rows too short to copy one by one): its bytes cross
  as they lie, or as dense rows, and are put in place on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from fastload_common.plan.geometry import contiguous_strides
from fastload_common.plan.pieces import Piece

__all__ = [
    "SHORTEST_ROW_BYTES",
    "Dense",
    "Rows",
    "Run",
    "Spread",
    "Table",
    "dense",
    "route",
    "tables",
]

# Below, a copy engine spends its time on rows, not on bytes. Not measured: see docs/gpu.md.
SHORTEST_ROW_BYTES = 256
# One call for each table of rows; beyond this many, one copy and a kernel are cheaper.
_MOST_TABLES = 64
# Bytes that nobody needs may cross as long as they are no more than so many times the needed ones.
_MOST_WASTE = 4
# What the copy engines take for the distance of two rows.
_LONGEST_PITCH_BYTES = (1 << 31) - 1


class Run(NamedTuple):
    """One run: bytes, from a byte of the source to an element of the destination."""

    size_bytes: int


class Rows(NamedTuple):
    """Tables of rows, straight into the destination."""


class Dense(NamedTuple):
    """Tables of rows into dense memory of the device, and from there into the destination."""


class Spread(NamedTuple):
    """All bytes from the first to the last one, and from there into the destination."""

    span_bytes: int


class Table(NamedTuple):
    """Rows of equal distance; offsets and strides in elements, from those of the piece."""

    src_offset: int
    dst_offset: int
    rows: int
    width: int
    src_stride: int
    dst_stride: int


def route(piece: Piece, itemsize_bytes: int, *, same_dtype: bool) -> Run | Rows | Dense | Spread:
    """Choose.

    Args:
        piece: nested on the source side, dimensions as `plan.geometry.ordered` has them.
        itemsize_bytes: of one element of the source.
        same_dtype: whether bytes may be copied as they are.
    """
    sizes, src, dst = piece.sizes, piece.src_strides, piece.dst_strides
    if same_dtype and (not sizes or (len(sizes) == 1 and src[0] == dst[0] == 1)):
        return Run((sizes[0] if sizes else 1) * itemsize_bytes)
    has_rows = len(sizes) >= 2 and src[-1] == 1 and _are_rows(sizes, src, itemsize_bytes)
    if has_rows and same_dtype and dst[-1] == 1 and _are_rows(sizes, dst, itemsize_bytes):
        return Rows()
    span = 1 + sum((n - 1) * s for n, s in zip(sizes, src, strict=True))
    needed = 1
    for n in sizes:
        needed *= n
    if has_rows and span > needed * _MOST_WASTE:
        return Dense()
    return Spread(span * itemsize_bytes)


def _are_rows(sizes: tuple[int, ...], strides: tuple[int, ...], itemsize_bytes: int) -> bool:
    """Whether a few tables of rows hold it, and the rows are worth it."""
    tables_count = 1
    for size in sizes[:-2]:
        tables_count *= size
    return (
        tables_count <= _MOST_TABLES
        and sizes[-1] * itemsize_bytes >= SHORTEST_ROW_BYTES
        and sizes[-1] <= strides[-2]
        and strides[-2] * itemsize_bytes <= _LONGEST_PITCH_BYTES
    )


def dense(piece: Piece, offset: int) -> Piece:
    """The same piece where the destination is dense memory, from an element of it on."""
    return piece._replace(dst_offset=offset, dst_strides=contiguous_strides(piece.sizes))


def tables(piece: Piece) -> Iterator[Table]:
    """The tables of rows that a piece of at least two dimensions is made of."""
    *outer, rows, width = piece.sizes
    *src_outer, src_stride, _ = piece.src_strides
    *dst_outer, dst_stride, _ = piece.dst_strides
    for place in product(*map(range, outer)):
        yield Table(
            piece.src_offset + sum(k * s for k, s in zip(place, src_outer, strict=True)),
            piece.dst_offset + sum(k * s for k, s in zip(place, dst_outer, strict=True)),
            rows,
            width,
            src_stride,
            dst_stride,
        )
