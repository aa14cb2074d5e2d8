"""The plan of a node: each needed byte comes once, to all who need it, evenly divided."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.plan.cutting import ALIGNMENT_BYTES
from fastload_common.plan.geometry import View
from fastload_common.plan.needs import Needs
from fastload_common.plan.node import NodeChunk, NodePlan, plan_node
from fastload_common.plan.planner import plan_for, plan_reads
from fastload_common.plan.records import Chunk, TensorRead
from fastload_common.ranges import ByteRange, ObjectId

KIB = 1024
OBJECTS = [ObjectId(f"s3://b/{name}", '"1"', 1 << 20) for name in "abc"]


@st.composite
def reads(draw: st.DrawFn) -> TensorRead:
    """Rows, columns and flat slices at any offset of small objects."""
    rows, columns = draw(st.integers(0, 12)), draw(st.integers(1, 80))
    strides = draw(st.sampled_from([(columns, 1), (columns + 3, 1), (1, rows + 40), (700, 2)]))
    view = View((rows, columns), strides, draw(st.integers(0, 2000)))
    start = draw(st.integers(0, 3000))
    return TensorRead(draw(st.sampled_from(OBJECTS)), start, draw(st.sampled_from([1, 2, 8])), view)


ranks_reads = st.lists(st.lists(reads(), max_size=5), min_size=1, max_size=4)
chunk_sizes = st.sampled_from([64, 128, 640, 4096, 1 << 20])
gap_sizes = st.sampled_from([0, 10, 200, 3000, 100_000])


def needed(read: TensorRead) -> set[tuple[int, int]]:
    """(object, byte) of everything that a read needs."""
    cells = [read.view.offset]
    for size, stride in zip(read.view.sizes, read.view.strides, strict=True):
        cells = [cell + i * stride for cell in cells for i in range(size)]
    return {
        (OBJECTS.index(read.object_id), read.data_start + cell * read.itemsize_bytes + byte)
        for cell in cells
        for byte in range(read.itemsize_bytes)
    }


def plan_of(
    ranks: list[list[TensorRead]], chunk_bytes: int, gap_bytes: int, *, by_object: bool = False
) -> NodePlan:
    needs = [Needs.of(rank, OBJECTS, gap_bytes=gap_bytes) for rank in ranks]
    return plan_node(needs, chunk_bytes=chunk_bytes, gap_bytes=gap_bytes, by_object=by_object)


def check_form(plan: NodePlan, chunk_bytes: int, ranks: int) -> None:
    """What holds of every plan, whatever is needed."""
    before = (-1, 0)
    for chunk in plan.chunks:
        assert 0 < chunk.end - chunk.start <= chunk_bytes
        assert chunk.start % ALIGNMENT_BYTES == 0
        assert chunk.consumers == tuple(sorted(set(chunk.consumers)))
        assert chunk.owner in chunk.consumers
        assert set(chunk.consumers) <= set(range(ranks))
        if chunk.object_index == before[0]:
            assert chunk.start > before[1] - ALIGNMENT_BYTES, "more than the alignment comes twice"
        else:
            assert chunk.object_index > before[0]
        before = (chunk.object_index, chunk.end)
    sizes = [chunk.end - chunk.start for chunk in plan.chunks]
    assert plan.fetched_bytes == sum(sizes) == sum(plan.fetched_by_rank)
    for rank in range(ranks):
        mine = [
            size
            for size, chunk in zip(sizes, plan.chunks, strict=True)
            if rank in chunk.consumers and chunk.owner != rank
        ]
        assert plan.received_by_rank[rank] == sum(mine)
    assert plan.shared_bytes == sum(
        size for size, chunk in zip(sizes, plan.chunks, strict=True) if len(chunk.consumers) > 1
    )


@settings(max_examples=200)
@given(ranks_reads, chunk_sizes, gap_sizes, st.booleans())
def test_every_needed_byte_is_in_a_chunk_for_its_rank(
    ranks: list[list[TensorRead]], chunk_bytes: int, gap_bytes: int, by_object: bool
) -> None:
    plan = plan_of(ranks, chunk_bytes, gap_bytes, by_object=by_object)
    check_form(plan, chunk_bytes, len(ranks))
    for rank, rank_reads in enumerate(ranks):
        wanted = set().union(*map(needed, rank_reads))
        mine = {
            (chunk.object_index, byte)
            for chunk in plan.chunks
            if rank in chunk.consumers
            for byte in range(chunk.start, chunk.end)
        }
        assert wanted <= mine
        if not wanted:
            assert not any(rank in chunk.consumers for chunk in plan.chunks)
    if not gap_bytes:
        everything = set().union(*(needed(read) for rank in ranks for read in rank))
        for chunk in plan.chunks:
            check_is_needed(chunk, everything)


def check_is_needed(chunk: NodeChunk, everything: set[tuple[int, int]]) -> None:
    """Nothing is read but gaps below the alignment, which are always read over."""
    cells = range(chunk.start, chunk.end)
    found = [byte for byte in cells if (chunk.object_index, byte) in everything]
    before = [chunk.start - 1, *found[:-1]]
    assert all(b - a <= ALIGNMENT_BYTES for a, b in zip(before, found, strict=True))
    assert found[-1] == chunk.end - 1


@settings(max_examples=100)
@given(ranks_reads, chunk_sizes, gap_sizes, st.booleans())
def test_each_rank_finds_its_readers(
    ranks: list[list[TensorRead]], chunk_bytes: int, gap_bytes: int, by_object: bool
) -> None:
    plan = plan_of(ranks, chunk_bytes, gap_bytes, by_object=by_object)
    for rank, rank_reads in enumerate(ranks):
        mine = [chunk_of(chunk) for chunk in plan.chunks if rank in chunk.consumers]
        own = plan_for(rank_reads, mine[::-1])
        assert own.chunks == mine[::-1]
        for number, read in enumerate(rank_reads):
            seen: set[tuple[int, int]] = set()
            for chunk, readers in zip(own.chunks, own.readers, strict=True):
                assert readers == sorted(set(readers))
                if number in readers:
                    span = chunk.byte_range
                    index = OBJECTS.index(chunk.object_id)
                    seen |= {(index, byte) for byte in range(span.start, span.end)}
            assert needed(read) <= seen
            assert own.chunk_counts[number] == sum(number in who for who in own.readers)


def chunk_of(chunk: NodeChunk) -> Chunk:
    return Chunk(OBJECTS[chunk.object_index], ByteRange(chunk.start, chunk.end), 0)


@settings(max_examples=100)
@given(st.lists(reads(), max_size=6), chunk_sizes, gap_sizes)
def test_the_readers_of_a_plan_are_found_again(
    wanted: list[TensorRead], chunk_bytes: int, gap_bytes: int
) -> None:
    plan = plan_reads(wanted, chunk_bytes=chunk_bytes, merge_gap_bytes=gap_bytes)
    again = plan_for(wanted, plan.chunks)
    assert again == plan


def test_chunks_that_lack_a_byte_are_refused() -> None:
    read = TensorRead(OBJECTS[0], 0, 2, View((10, 10), (100, 1), 0))
    chunks = [Chunk(OBJECTS[0], ByteRange(0, 1818), 0), Chunk(OBJECTS[1], ByteRange(0, 9), 0)]
    with pytest.raises(ValueError, match="do not hold all bytes of read 1"):
        plan_for([TensorRead(OBJECTS[0], 0, 1, View((3,), (1,), 0)), read], chunks)
    whole = plan_for([read], [Chunk(OBJECTS[0], ByteRange(0, 1820), 0), chunks[1]])
    assert whole.readers == [[0], []]
    assert whole.needed_bytes == 200


def test_what_two_chunks_hold_counts_once() -> None:
    chunks = [Chunk(OBJECTS[0], ByteRange(start, end), 0) for start, end in ((0, 100), (64, 200))]
    plan = plan_for([flat(0, 200), flat(70, 20)], chunks)
    assert plan.needed_bytes == 100 + 100
    assert plan.readers == [[0, 1], [0]]


def test_a_chunk_in_a_gap_of_a_read_is_not_for_it() -> None:
    rows = TensorRead(OBJECTS[0], 0, 1, View((2, 64), (640, 1), 0))
    chunks = [Chunk(OBJECTS[0], ByteRange(k * 64, k * 64 + 64), 0) for k in range(11)]
    plan = plan_for([rows, rows], chunks)
    assert plan.readers == [[0, 1], *[[]] * 9, [0, 1]]
    assert plan.needed_bytes == 128


def test_the_same_slice_twice_needs_its_bytes_once() -> None:
    rows = TensorRead(OBJECTS[0], 0, 1, View((10, 8), (100, 1), 0))
    assert plan_for([rows, rows], [Chunk(OBJECTS[0], ByteRange(0, 1000), 0)]).needed_bytes == 80


@settings(max_examples=100)
@given(ranks_reads, chunk_sizes, gap_sizes, st.booleans(), st.randoms(use_true_random=False))
def test_the_order_of_reads_does_not_matter(
    ranks: list[list[TensorRead]], chunk_bytes: int, gap_bytes: int, by_object: bool, random: Random
) -> None:
    plan = plan_of(ranks, chunk_bytes, gap_bytes, by_object=by_object)
    for rank in ranks:
        random.shuffle(rank)
    assert plan_of(ranks, chunk_bytes, gap_bytes, by_object=by_object) == plan
    told = [
        Needs.decode(Needs.of(rank, OBJECTS, gap_bytes=gap_bytes).encode(), 3) for rank in ranks
    ]
    again = plan_node(told, chunk_bytes=chunk_bytes, gap_bytes=gap_bytes, by_object=by_object)
    assert again == plan


@settings(max_examples=100)
@given(ranks_reads, chunk_sizes, gap_sizes)
def test_each_object_has_one_owner_that_needs_some_of_it(
    ranks: list[list[TensorRead]], chunk_bytes: int, gap_bytes: int
) -> None:
    plan = plan_of(ranks, chunk_bytes, gap_bytes, by_object=True)
    owners: dict[int, set[int]] = {}
    for chunk in plan.chunks:
        owners.setdefault(chunk.object_index, set()).add(chunk.owner)
    for index, found in owners.items():
        (owner,) = found
        assert any(index in {k for k, _ in needed(read)} for read in ranks[owner])


@given(
    st.lists(st.integers(1, 90 * KIB), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from([4 * KIB, 16 * KIB]),
)
def test_what_all_need_is_divided_evenly(lengths: list[int], ranks: int, chunk_bytes: int) -> None:
    wanted, start = [], 0
    for length in lengths:
        wanted.append(TensorRead(OBJECTS[0], start, 1, View((length,), (1,), 0)))
        start += length + 1000
    plan = plan_of([wanted] * ranks, chunk_bytes, 0)
    check_form(plan, chunk_bytes, ranks)
    assert max(plan.fetched_by_rank) - min(plan.fetched_by_rank) <= chunk_bytes
    assert all(chunk.consumers == tuple(range(ranks)) for chunk in plan.chunks)
    assert plan.needed_bytes == sum(lengths)
    assert plan.fetched_bytes < sum(lengths) + len(lengths) * ALIGNMENT_BYTES


def test_who_needs_a_part_alone_fetches_less_of_what_all_need() -> None:
    shared = flat(0, 64 * KIB)
    plan = plan_of([[shared, flat(100 * KIB, 20 * KIB)], [shared], [shared]], 4 * KIB, 0)
    assert plan.fetched_by_rank == (28 * KIB, 28 * KIB, 28 * KIB)


def test_large_slices_of_one_tensor_stay_with_their_ranks() -> None:
    def rows(rank: int) -> list[TensorRead]:
        return [TensorRead(OBJECTS[0], 8, 2, View((50, 1000), (1000, 1), rank * 50_000))]

    plan = plan_of([rows(rank) for rank in range(4)], 16 * KIB, 1 * KIB)
    check_form(plan, 16 * KIB, 4)
    assert all(chunk.consumers == (chunk.owner,) for chunk in plan.chunks)
    assert plan.shared_bytes == 0
    assert plan.received_by_rank == (0, 0, 0, 0)
    # 100,000 bytes each; a slice begins inside an aligned block that its neighbour reads as well.
    assert all(100_000 <= fetched < 100_064 for fetched in plan.fetched_by_rank)


def test_small_slices_of_many_ranks_come_by_whole_chunks() -> None:
    def rows(rank: int) -> list[TensorRead]:
        return [
            TensorRead(OBJECTS[0], expert * 8000, 1, View((1000,), (1,), rank * 1000))
            for expert in range(64)
        ]

    plan = plan_of([rows(rank) for rank in range(8)], 16 * KIB, 0)
    assert len(plan.chunks) == math.ceil(64 * 8000 / (16 * KIB))
    assert plan.fetched_bytes == plan.needed_bytes == 64 * 8000
    assert max(plan.fetched_by_rank) - min(plan.fetched_by_rank) <= 16 * KIB


def flat(start: int, length: int) -> TensorRead:
    return TensorRead(OBJECTS[0], start, 1, View((length,), (1,), 0))


def test_neighbours_that_the_same_ranks_need_come_by_whole_chunks() -> None:
    """As experts are: two tensors in small slices, one that all ranks take columns of."""

    def expert(rank: int) -> list[TensorRead]:
        return [flat(rank * 3000, 3000), flat(12_000, 30_000)]

    plan = plan_of([expert(rank) for rank in range(4)], 16 * KIB, 0)
    assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [
        (0, 16 * KIB),
        (16 * KIB, 32 * KIB),
        (32 * KIB, 42_000),
    ]


def test_a_large_slice_behind_small_ones_is_not_shared() -> None:
    small = [[flat(rank * 5120, 5120)] for rank in range(4)]
    small[0].append(flat(4 * 5120, 40_000))
    plan = plan_of(small, 16 * KIB, 0)
    assert any(c.start == 4 * 5120 for c in plan.chunks)
    assert all(c.consumers == (0,) for c in plan.chunks if c.start >= 4 * 5120)
    assert all(len(c.consumers) > 1 for c in plan.chunks if c.end <= 16 * KIB)
    # Too little for a chunk of its own goes with what lies before it, or else behind it.
    few = plan_of([[flat(0, 640)], [flat(640, 40_000)], [flat(40_640, 64)]], 16 * KIB, 0)
    assert [chunk.consumers for chunk in few.chunks] == [(0, 1), (1,), (1, 2)]


def test_columns_of_all_ranks_are_fetched_once() -> None:
    def columns(rank: int) -> list[TensorRead]:
        return [TensorRead(OBJECTS[0], 0, 2, View((512, 32), (256, 1), rank * 32))]

    plan = plan_of([columns(rank) for rank in range(8)], 16 * KIB, 1 << 20)
    assert plan.fetched_bytes == plan.needed_bytes == 512 * 256 * 2
    # The first and the last row, of which a rank needs a part, take no part in it.
    assert all(len(chunk.consumers) >= 7 for chunk in plan.chunks)


def test_a_rank_that_needs_nothing_fetches_nothing() -> None:
    whole = TensorRead(OBJECTS[1], 0, 1, View((100_000,), (1,), 0))
    plan = plan_of([[whole], [], [whole]], 4 * KIB, 0)
    assert plan.fetched_by_rank[1] == plan.received_by_rank[1] == 0
    assert {chunk.consumers for chunk in plan.chunks} == {(0, 2)}


def test_nobody_needs_anything() -> None:
    assert plan_of([[], []], 4 * KIB, 0).chunks == []
    assert plan_node([], chunk_bytes=64, gap_bytes=0).chunks == []


def test_needs_of_different_tables_are_refused() -> None:
    needs = [Needs.of([], OBJECTS, gap_bytes=0), Needs.of([], OBJECTS[:2], gap_bytes=0)]
    with pytest.raises(ValueError, match="different numbers of objects"):
        plan_node(needs, chunk_bytes=64, gap_bytes=0)
    with pytest.raises(ValueError, match="multiple of 64"):
        plan_node(needs[:1], chunk_bytes=100, gap_bytes=0)
