"""Elements of every width, down to half a byte: the exact bytes are planned, read and placed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.checkpoint.dtypes import DTYPE_BITS
from fastload_common.checkpoint.records import TensorEntry
from fastload_common.errors import TensorMismatchError
from fastload_common.plan.extents import ReadTable
from fastload_common.plan.geometry import View
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.trace.dtypes import torch_layout
from tests.bits import bytes_of
from tests.common.trace.harness import MemoryCheckpoint

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 12, 40
OBJECT = ObjectId("s3://b/model.safetensors", '"1"', 1 << 20)
NOT_IN_TORCH = {"F6_E2M3", "F6_E3M2"}


def entry_of(dtype: str, *shape: int) -> TensorEntry:
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    return TensorEntry("w", dtype, shape, OBJECT, ByteRange(64, 64 + bits // 8))


@pytest.mark.parametrize("lead_bytes", [64, 72, 61])
@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BITS) - NOT_IN_TORCH))
def test_slices_of_every_width_are_read_exactly(dtype: str, lead_bytes: int) -> None:
    entry = entry_of(dtype, ROWS, COLUMNS)
    kind, shape = torch_layout(entry)
    raw = torch.arange(entry.byte_range.size_bytes).to(torch.uint8)
    if dtype == "BOOL":
        raw %= 2
    real = raw.view(kind).reshape(shape)
    checkpoint = MemoryCheckpoint({"w": raw}, lead_bytes=lead_bytes)
    stored = checkpoint.entries["w"]
    checkpoint.entries["w"] = replace(stored, dtype=dtype, shape=entry.shape)
    rows = torch.empty(3, shape[1], dtype=kind)
    columns = torch.empty(ROWS, 5, dtype=kind)

    def consume(loaded: dict[str, torch.Tensor]) -> None:
        assert loaded["w"].dtype == kind
        rows.copy_(loaded["w"].narrow(0, 5, 3))
        columns.copy_(loaded["w"].narrow(1, 7, 5))

    checkpoint.run(consume)
    assert bytes_of(rows) == bytes_of(real.narrow(0, 5, 3))
    assert bytes_of(columns) == bytes_of(real.narrow(1, 7, 5))


@given(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, ROWS - 1),
    st.integers(0, COLUMNS - 1),
    st.data(),
)
def test_the_bytes_of_a_slice_are_exact(
    itemsize: int, top: int, left: int, data: st.DataObject
) -> None:
    rows, columns = data.draw(st.integers(1, ROWS - top)), data.draw(st.integers(1, COLUMNS - left))
    view = View((rows, columns), (COLUMNS, 1), top * COLUMNS + left)
    table = ReadTable([TensorRead(OBJECT, 61, itemsize, view)])
    assert table.needed_bytes() == rows * columns * itemsize
    (spans,) = table.spans(0)
    first = [61 + itemsize * ((top + row) * COLUMNS + left) for row in range(rows)]
    if columns == COLUMNS:
        expected = [[first[0], first[0] + rows * columns * itemsize]]
    else:
        expected = [[start, start + columns * itemsize] for start in first]
    assert spans.tolist() == expected


def test_half_bytes_are_packed_in_pairs() -> None:
    kind, shape = torch_layout(entry_of("F4", 3, 10))
    assert (kind.itemsize, shape) == (1, (3, 5))


def test_half_bytes_that_no_byte_border_separates_are_refused() -> None:
    # Rows of 5 elements: every second one begins in the middle of a byte.
    with pytest.raises(TensorMismatchError, match="odd count of 4-bit elements") as caught:
        torch_layout(entry_of("F4", 4, 5))
    assert caught.value.hint == "pack the last dimension to an even size"


@pytest.mark.parametrize("dtype", sorted(NOT_IN_TORCH))
def test_six_bit_elements_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(TensorMismatchError, match=f"'w' has dtype {dtype}, which torch"):
        torch_layout(entry_of(dtype, 4, 4))
