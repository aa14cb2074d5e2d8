"""The exchange in one process, where faults are exact: right bytes, no circle, one first error."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Generator, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload_common.exchange.slots import PeerChunk, PeerMemory, read_only
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ObjectId
from fastload_common.testing.fake_clock import FakeClock
from tests.common.exchange.node_harness import (
    CHUNK_BYTES,
    FilledSlot,
    MemoryFetch,
    Rank,
    all_is_right,
    make_objects,
    ranks,
    read_of,
    run_all,
    with_terms,
)

OBJECTS = make_objects(3, 20 * CHUNK_BYTES)
IDS = list(OBJECTS)
ALL = [(one, 0, one.size_bytes) for one in IDS]

pytestmark = pytest.mark.usefixtures("nothing_is_left")


SPAN = st.tuples(
    st.sampled_from(IDS), st.integers(0, 20 * CHUNK_BYTES - 1), st.integers(1, 6 * CHUNK_BYTES)
)
NEEDS = st.lists(st.lists(SPAN, max_size=6), min_size=2, max_size=5)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(NEEDS, st.lists(st.integers(1, 3), min_size=5, max_size=5), st.booleans())
def test_whatever_ranks_need_each_gets_it_and_it_is_fetched_once(
    spans: list[list[tuple[ObjectId, int, int]]], slots: list[int], by_object: bool
) -> None:
    needs = [
        [(one, start, min(one.size_bytes, start + size)) for one, start, size in row]
        for row in spans
    ]
    with ranks(OBJECTS, needs, slots=slots[: len(needs)], by_object=by_object) as made:
        run_all(made)
        all_is_right(made, OBJECTS)
    fetched: dict[ObjectId, list[tuple[int, int]]] = {one: [] for one in IDS}
    for number, row in enumerate(made):
        for chunk in row.fetch.fetched:
            fetched[chunk.object_id].append((chunk.byte_range.start, chunk.byte_range.end))
        got = sum(chunk.byte_range.size_bytes for chunk in row.fetch.fetched)
        assert row.exchange.fetched_bytes == got, number
    for found in fetched.values():
        found.sort()
        # A chunk may begin less than an alignment before the end of the one before it.
        for (_, end), (start, _) in itertools.pairwise(found):
            assert start > end - 64
    if by_object:
        owners = [{chunk.object_id for chunk in row.fetch.fetched} for row in made]
        assert sum(map(len, owners)) == len(set().union(*owners))


def test_eight_ranks_with_two_slots_each_and_one_ten_times_slower() -> None:
    with ranks(OBJECTS, [ALL] * 8, slots=2) as made:
        slow = [lambda row: row.load(slow_s=0.004)]
        run_all(made, slow + [lambda row: row.load(slow_s=0.0004)] * 7)
        all_is_right(made, OBJECTS)
        total = sum(row.exchange.fetched_bytes for row in made)
    assert total == sum(one.size_bytes for one in IDS)


def test_one_slot_each_is_enough() -> None:
    with ranks(OBJECTS, [ALL] * 4, slots=1) as made:
        run_all(made)
        all_is_right(made, OBJECTS)


def test_who_needs_nothing_of_others_does_not_hold_them_up() -> None:
    with ranks(OBJECTS, [ALL, ALL, []]) as made:
        alone = lambda row: row.exchange.read_alone()  # noqa: E731
        run_all(made, [Rank.load, Rank.load, alone])
        all_is_right(made, OBJECTS)
        assert made[2].fetch.fetched == []


def test_all_reading_alone_end() -> None:
    with ranks(OBJECTS, [ALL] * 3) as made:
        run_all(made, lambda row: row.exchange.read_alone())
        all_is_right(made, OBJECTS)


def test_who_gives_up_half_way_still_serves_the_others() -> None:
    """As a rank does that reads eagerly after an error in the middle of placing."""

    def half_way(row: Rank) -> None:
        def stop(number: int) -> None:
            if number == 7:
                raise KeyError("a fault while placing")

        with pytest.raises(KeyError):
            row.load(on_chunk=stop)
        row.exchange.read_alone()
        assert sum(1 for _ in row.fetch([])) == 0  # the way to fetch is free again

    with ranks(OBJECTS, [ALL] * 3, slots=2) as made:
        run_all(made, [Rank.load, half_way, Rank.load])
        for row in (made[0], made[2]):
            assert row.error is None
            assert row.got == {(one, s, e): OBJECTS[one][s:e] for one, s, e in ALL}


def test_a_chunk_that_nobody_gave_back_before_an_error_holds_up_nobody() -> None:
    def half_way(row: Rank) -> None:
        row.exchange.agree([read_of(*need) for need in row.needs])
        for number, filled in enumerate(row.exchange.fetch()):
            if number == 5:
                break  # as an exception would
            filled.release()
        row.exchange.read_alone()

    with ranks(OBJECTS, [ALL] * 3, slots=1) as made:
        run_all(made, [half_way, half_way, Rank.load])
        assert [row.error for row in made] == [None] * 3


def test_the_way_to_fetch_is_free_when_all_has_come() -> None:
    """Whoever then reads by itself uses the same one, and only one fetch runs at a time."""

    class Lingers(MemoryFetch):
        running = False

        def __call__(self, chunks: Iterable[Chunk]) -> Generator[FilledSlot, None, None]:
            self.running = True
            try:
                yield from super().__call__(chunks)
            finally:
                threading.Event().wait(0.2)
                self.running = False

    with ranks(OBJECTS, [ALL] * 2) as made:
        fetch = Lingers(OBJECTS, made[0].arena)
        with_terms(made[0], fetch=fetch, abort=fetch.abort)

        def look(row: Rank) -> None:
            row.exchange.agree([read_of(*need) for need in row.needs])
            for filled in row.exchange.fetch():
                filled.release()
            assert not fetch.running

        run_all(made, [look, Rank.load])
        assert [row.error for row in made] == [None, None]


def test_memory_of_others_cannot_be_written() -> None:
    seen = []

    def check(row: Rank) -> None:
        row.exchange.agree([read_of(*need) for need in row.needs])
        for filled in row.exchange.fetch():
            if isinstance(filled, PeerChunk):
                seen.append(filled.data.readonly)
                with pytest.raises(TypeError):
                    filled.data[0] = 1
            filled.release()
        row.exchange.leave()

    with ranks(OBJECTS, [ALL] * 2) as made:
        run_all(made, check)
        assert [row.error for row in made] == [None, None]
    assert seen
    assert all(seen)


def test_a_descriptor_that_was_given_away_cannot_write_nor_be_mapped_for_it() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, mmap.PAGESIZE)
    given_fd = read_only(fd)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(given_fd, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(given_fd, mmap.PAGESIZE)
        memory = PeerMemory(given_fd, mmap.PAGESIZE)
        os.pwrite(fd, b"seen", 0)
        view = memory.at(0, 4)
        assert bytes(view) == b"seen"
        with pytest.raises(ValueError, match="of 4096"):
            memory.at(4090, 10)
        memory.close()
        assert bytes(view) == b"seen"  # whoever looks still may
        view.release()
    finally:
        os.close(fd)
        os.close(given_fd)


def test_objects_are_divided_among_those_who_compare_them() -> None:
    some = [(IDS[0], 0, 100), (IDS[1], 0, 100)]
    with ranks(OBJECTS, [some] * 3, by_object=True) as made:
        run_all(made)
        all_is_right(made, OBJECTS)
        own = [set(IDS) - row.exchange.objects_of_others() for row in made]
    # Two have an owner; the third, which nobody needs, has one all the same.
    assert sorted(one.uri for part in own for one in part) == sorted(one.uri for one in IDS)


def test_smaller_slots_of_one_rank_are_what_all_chunks_fit_in() -> None:
    with ranks(OBJECTS, [ALL] * 3) as made:
        with_terms(made[2], chunk_bytes=CHUNK_BYTES // 4)
        run_all(made)
        all_is_right(made, OBJECTS)
        sizes = {c.byte_range.size_bytes for row in made for c in row.fetch.fetched}
    assert max(sizes) == CHUNK_BYTES // 4


def test_waiting_for_ones_own_fetch_is_not_waiting_for_others() -> None:
    clock = FakeClock()

    class Clocked(MemoryFetch):
        def __call__(self, chunks: Iterable[Chunk]) -> Generator[FilledSlot, None, None]:
            for filled in super().__call__(chunks):
                clock.advance(5)
                yield filled

    half = IDS[0].size_bytes
    with ranks(OBJECTS, [[(IDS[0], 0, half)], [(IDS[1], 0, half)]], clock=clock, slots=1) as made:
        fetch = Clocked(OBJECTS, made[0].arena)
        with_terms(made[0], fetch=fetch, abort=fetch.abort)
        told = threading.Event()

        def quick(row: Rank) -> None:
            row.exchange.agree([read_of(*need) for need in row.needs])
            told.wait(10)
            for filled in row.exchange.fetch():
                filled.release()
            row.exchange.leave()

        def clocked(row: Rank) -> None:
            row.exchange.agree([read_of(*need) for need in row.needs])
            waited_s = row.exchange.facts()["wait_s"]
            for filled in row.exchange.fetch():
                filled.release()
            assert clock.monotonic_s() >= 1000 + 5 * 20
            assert row.exchange.facts()["wait_s"] == waited_s
            told.set()
            row.exchange.leave()

        run_all(made, [clocked, quick])
        for row in made:
            assert row.error is None
