"""What is planned holds what is needed, in order, no byte twice, within the limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.plan.extents import ReadTable
from fastload_common.plan.geometry import View, contiguous_strides
from fastload_common.plan.planner import ALIGNMENT_BYTES, plan_reads
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId

OBJECTS = [ObjectId(f"s3://b/{name}", '"1"', 1 << 20) for name in "abc"]


def needed(read: TensorRead) -> set[int]:
    """Every byte of the object that a read needs."""
    cells = [read.view.offset]
    for size, stride in zip(read.view.sizes, read.view.strides, strict=True):
        cells = [cell + i * stride for cell in cells for i in range(size)]
    return {
        read.data_start + cell * read.itemsize_bytes + byte
        for cell in cells
        for byte in range(read.itemsize_bytes)
    }


def merged(cells: set[int], gap_bytes: int) -> list[list[int]]:
    """Bytes as ranges, gaps of up to so many bytes merged: one byte after the other."""
    found: list[list[int]] = []
    for byte in sorted(cells):
        if found and byte - found[-1][1] <= gap_bytes:
            found[-1][1] = byte + 1
        else:
            found.append([byte, byte + 1])
    return found


@st.composite
def reads(draw: st.DrawFn) -> TensorRead:
    rows, columns = draw(st.integers(0, 12)), draw(st.integers(1, 40))
    top, left = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    strides = contiguous_strides((rows + 3, columns + 3))
    if draw(st.booleans()):
        view = View((rows, columns), strides, top * strides[0] + left)
    else:
        view = View((columns, rows), strides[::-1], top * strides[0] + left)
    return TensorRead(
        draw(st.sampled_from(OBJECTS)),
        draw(st.integers(0, 3000)),
        draw(st.sampled_from([1, 2, 4, 8])),
        view,
    )


@settings(max_examples=200)
@given(
    st.lists(reads(), max_size=6),
    st.sampled_from([1, 2, 5, 64]),
    st.sampled_from([0, 10, 200, 100_000]),
)
def test_a_plan_holds_what_is_needed(
    wanted: list[TensorRead], chunk_units: int, gap_bytes: int
) -> None:
    chunk_bytes = chunk_units * ALIGNMENT_BYTES
    plan = plan_reads(wanted, chunk_bytes=chunk_bytes, merge_gap_bytes=gap_bytes)
    covered: dict[str, set[int]] = {}
    for chunk, readers in zip(plan.chunks, plan.readers, strict=True):
        span = chunk.byte_range
        assert 0 < span.size_bytes <= chunk_bytes
        assert span.start % ALIGNMENT_BYTES == 0
        assert readers == sorted(set(readers))
        assert 0 < chunk.needed_bytes <= span.size_bytes
        bytes_here = set(range(span.start, span.end))
        before = covered.setdefault(chunk.object_id.uri, set())
        assert not before & bytes_here, "a byte is fetched twice"
        before |= bytes_here
        for index in readers:
            assert wanted[index].object_id == chunk.object_id
    for index, read in enumerate(wanted):
        assert needed(read) <= covered.get(read.object_id.uri, set())
        assert plan.chunk_counts[index] == sum(index in readers for readers in plan.readers)
        # A chunk that holds a needed byte must name its reader.
        for chunk, readers in zip(plan.chunks, plan.readers, strict=True):
            if chunk.object_id == read.object_id:
                span = chunk.byte_range
                if any(span.start <= byte < span.end for byte in needed(read)):
                    assert index in readers
    firsts = [readers[0] for readers in plan.readers]
    assert firsts == sorted(firsts)
    assert plan.fetched_bytes == sum(chunk.byte_range.size_bytes for chunk in plan.chunks)


@given(reads(), st.sampled_from([0, 7, 64, 100_000]))
def test_extents_hold_the_view_and_leave_long_gaps(read: TensorRead, gap_bytes: int) -> None:
    (found,) = ReadTable([read]).spans(gap_bytes)
    assert found.tolist() == merged(needed(read), gap_bytes)


def test_needed_bytes_are_exact_for_whole_rows() -> None:
    rows = TensorRead(OBJECTS[0], 640, 2, View((16, 100), (100, 1), 1600))
    plan = plan_reads([rows, rows], chunk_bytes=1024, merge_gap_bytes=0)
    assert plan.needed_bytes == 16 * 100 * 2  # twice the same view counts once
    assert plan.readers[0] == [0, 1]


def test_chunks_of_all_objects_come_in_the_order_of_first_use() -> None:
    whole = View((64,), (1,), 0)
    wanted = [TensorRead(OBJECTS[k], 0, 8, whole) for k in (2, 0, 1)]
    plan = plan_reads(wanted, chunk_bytes=256, merge_gap_bytes=0)
    assert [chunk.object_id.uri[-1] for chunk in plan.chunks] == list("ccaabb")


@pytest.mark.parametrize("chunk_bytes", [0, 100, -64])
def test_chunk_size_must_be_aligned(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        plan_reads([], chunk_bytes=chunk_bytes, merge_gap_bytes=0)
