"""The exchange in one process, where faults are exact: right bytes, no circle, one first error."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload_common.errors import (
    ChecksumMismatchError,
    DeadlineError,
    ObjectChangedError,
    OutOfBudgetError,
    PeerError,
    SourceUnavailableError,
)
from fastload_common.exchange.slots import PeerChunk, PeerMemory, read_only
from fastload_common.exchange.terms import digest_of
from fastload_common.exchange.words import FILLED_FORM, TAKEN_FORM, Word
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ObjectId
from fastload_common.testing.fake_clock import FakeClock
from tests.common.exchange.node_harness import (
    CHUNK_BYTES,
    FilledSlot,
    MemoryFetch,
    Rank,
    make_objects,
    ranks,
    read_of,
    run_all,
)

OBJECTS = make_objects(3, 20 * CHUNK_BYTES)
IDS = list(OBJECTS)
ALL = [(one, 0, one.size_bytes) for one in IDS]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    left = [t.name for t in threading.enumerate() if t.name.startswith("fastload")]
    assert left == []


def all_is_right(made: list[Rank]) -> None:
    for row in made:
        if row.error is not None:
            raise row.error
        for (one, start, end), value in row.got.items():
            assert value == OBJECTS[one][start:end]
        assert row.arena.leased_count == 0


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
        all_is_right(made)
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
        all_is_right(made)
        total = sum(row.exchange.fetched_bytes for row in made)
    assert total == sum(one.size_bytes for one in IDS)


def test_one_slot_each_is_enough() -> None:
    with ranks(OBJECTS, [ALL] * 4, slots=1) as made:
        run_all(made)
        all_is_right(made)


def test_who_needs_nothing_of_others_does_not_hold_them_up() -> None:
    with ranks(OBJECTS, [ALL, ALL, []]) as made:
        alone = lambda row: row.exchange.read_alone()  # noqa: E731
        run_all(made, [Rank.load, Rank.load, alone])
        all_is_right(made)
        assert made[2].fetch.fetched == []


def test_all_reading_alone_end() -> None:
    with ranks(OBJECTS, [ALL] * 3) as made:
        run_all(made, lambda row: row.exchange.read_alone())
        all_is_right(made)


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


def test_a_failing_fetch_ends_all_with_its_error() -> None:
    broken = SourceUnavailableError("the store is away", object="s3://models/m/0")
    with ranks(OBJECTS, [ALL] * 4, fetches={2: {"fail_at": 3, "error": broken}}) as made:
        began_s = time.monotonic()
        run_all(made)
        assert made[2].error is broken
        for number in (0, 1, 3):
            error = made[number].error
            assert isinstance(error, PeerError)
            assert "rank 2 (pid" in str(error)
            assert "SourceUnavailableError: the store is away [object=s3://models/m/0]" in str(
                error
            )
            assert made[number].ended_s - began_s < 5
        assert [row.arena.leased_count for row in made] == [0] * 4


def test_a_foreign_error_is_told_by_its_name_only() -> None:
    def fails(row: Rank) -> None:
        raise RuntimeError("https://signed.example/?X-Amz-Signature=secret")

    with ranks(OBJECTS, [ALL] * 2) as made:
        run_all(made, [Rank.load, fails])
        error = made[0].error
        assert isinstance(error, PeerError)
        assert "failed: RuntimeError" in str(error)
        assert "secret" not in str(error)
        assert "signed" not in str(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_is_told_too(error: BaseException) -> None:
    def interrupted(row: Rank) -> None:
        raise error

    with ranks(OBJECTS, [ALL] * 3) as made:
        run_all(made, [Rank.load, interrupted, Rank.load])
        for row in (made[0], made[2]):
            assert isinstance(row.error, PeerError)
            assert type(error).__name__ in str(row.error)


def test_the_first_failure_is_named_by_those_who_hear_it_from_others() -> None:
    """Rank 0 fails; rank 2 hears of it from rank 1 only, whose load ended by it."""

    def fails(row: Rank) -> None:
        raise SourceUnavailableError("the cause")

    with ranks(OBJECTS, [ALL] * 3) as made:
        # What rank 0 says to rank 2 is lost.
        lost = made[0].exchange._peers.lines[2].outbox
        lost.send = lambda *args: True  # type: ignore[method-assign]
        run_all(made, [fails, Rank.load, Rank.load])
        for row in made[1:]:
            assert isinstance(row.error, PeerError)
        assert "rank 0 (pid" in str(made[1].error)
        assert "the cause" in str(made[1].error)


def test_a_process_that_ends_without_a_word_is_named() -> None:
    def vanishes(row: Rank) -> None:
        # As the kernel does with a process that is killed.
        for line in row.exchange._peers.lines.values():
            line.peer.shutdown(socket.SHUT_RDWR)
        time.sleep(0.2)
        raise KeyboardInterrupt

    with ranks(OBJECTS, [ALL] * 3) as made:
        run_all(made, [Rank.load, Rank.load, vanishes])
        for row in made[:2]:
            assert isinstance(row.error, PeerError)
            assert "rank 2 (pid" in str(row.error)
            assert "without a word (killed?)" in str(row.error)


def test_who_waits_for_acknowledgements_hears_of_a_failure() -> None:
    reached = threading.Event()

    def takes_nothing(row: Rank) -> None:
        row.exchange.agree([])
        reached.wait(10)
        raise SourceUnavailableError("while the other waits")

    def waits(row: Rank) -> None:
        row.exchange.agree([read_of(*need) for need in row.needs])
        for filled in row.exchange.fetch():
            filled.release()
        reached.set()
        row.exchange.leave()

    # By objects, the one waits until the other has compared its own.
    with ranks(OBJECTS, [ALL, []], by_object=True) as made:
        run_all(made, [waits, takes_nothing])
        assert isinstance(made[0].error, PeerError)
        assert "while the other waits" in str(made[0].error)


def test_a_rank_in_its_trace_notices_at_its_next_step() -> None:
    def traces(row: Rank) -> None:
        end_s = time.monotonic() + 10
        while time.monotonic() < end_s:
            row.exchange.check()
            time.sleep(0.001)

    def fails(row: Rank) -> None:
        raise SourceUnavailableError("early")

    with ranks(OBJECTS, [ALL] * 2) as made:
        run_all(made, [traces, fails])
        assert isinstance(made[0].error, PeerError)
        assert made[0].ended_s - made[1].ended_s < 5


def test_other_objects_are_a_changed_model() -> None:
    with ranks(OBJECTS, [ALL] * 2) as made:
        others = (ObjectId(IDS[0].uri, '"another"', IDS[0].size_bytes), *IDS[1:])
        with_terms(made[1], objects=others)
        made[1].needs = []
        run_all(made)
        kinds = {type(row.error) for row in made}
        assert ObjectChangedError in kinds
        assert kinds <= {ObjectChangedError, PeerError}
        assert all("it was changed while the ranks were opening it" in str(r.error) for r in made)


def test_the_deadline_counts_while_waiting_for_others() -> None:
    clock = FakeClock()
    over = threading.Event()

    def never_tells(row: Rank) -> None:
        over.wait(20)

    def waits(row: Rank) -> None:
        try:
            row.load()
        finally:
            over.set()

    with ranks(OBJECTS, [ALL] * 2, clock=clock, deadline_s=60) as made:
        clock.advance(61)
        run_all(made, [waits, never_tells])
        assert isinstance(made[0].error, DeadlineError)
        assert "waiting for the needs of rank 1 (pid" in str(made[0].error)
        assert isinstance(made[1].error, PeerError | None)


def test_who_is_waited_for_is_said_every_30_s(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    over = threading.Event()

    def never_tells(row: Rank) -> None:
        for _ in range(3):
            time.sleep(0.25)
            clock.advance(31)
        time.sleep(0.25)
        over.set()
        row.load()

    with ranks(OBJECTS, [ALL] * 2, clock=clock) as made, caplog.at_level(logging.WARNING):
        run_all(made, [Rank.load, never_tells])
        all_is_right(made)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert all(text.startswith("waiting for the needs of rank 1 (pid") for text in said)
    assert [text.rpartition("for ")[2] for text in said] == ["31 s now", "62 s now", "93 s now"]


def test_nonsense_of_a_rank_ends_the_load_and_names_it() -> None:
    for word, payload in [
        (Word.FILLED, FILLED_FORM.pack(999, 0)),
        (Word.FILLED, b"short"),
        (Word.TAKEN, TAKEN_FORM.pack(999)),
        (Word.NEEDS, b"short"),
        (Word.ARENA, b"twice"),
        (Word.FAILED, b"{}"),
        (77, b""),
    ]:

        def speaks(row: Rank, word: int = word, payload: bytes = payload) -> None:
            row.exchange._peers.tell(word, payload)  # type: ignore[arg-type]
            row.load()

        with ranks(OBJECTS, [ALL] * 2) as made:
            run_all(made, [Rank.load, speaks])
            assert isinstance(made[0].error, PeerError), word
            assert "rank 1" in str(made[0].error)
        gc.collect()


def test_a_slot_outside_of_the_memory_is_refused() -> None:
    class Elsewhere(MemoryFetch):
        def __call__(self, chunks: Iterable[Chunk]) -> Generator[FilledSlot, None, None]:
            for filled in super().__call__(chunks):
                filled.position_bytes = 1 << 40
                yield filled

    with ranks(OBJECTS, [ALL] * 2) as made:
        fetch = Elsewhere(OBJECTS, made[1].arena)
        with_terms(made[1], fetch=fetch, abort=fetch.abort)
        run_all(made)
        assert isinstance(made[0].error, PeerError)
        assert "its memory cannot be read" in str(made[0].error)


def test_memory_that_cannot_be_mapped_is_this_ranks_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object, **more: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    with ranks(OBJECTS, [ALL] * 2) as made:
        monkeypatch.setattr(mmap, "mmap", refused)
        run_all(made)
        kinds = [type(row.error) for row in made]
        assert OutOfBudgetError in kinds
        assert set(kinds) <= {OutOfBudgetError, PeerError}
        assert all("could not be mapped: Cannot allocate memory" in str(r.error) for r in made)


def with_terms(row: Rank, **changes: Any) -> None:
    """What a rank offered, as if it had been other terms."""
    row.exchange._terms = dataclasses.replace(row.exchange._its_terms(), **changes)
    row.exchange._by_object = row.exchange._its_terms().by_object


def test_other_headers_of_the_same_objects_are_damage() -> None:
    with ranks(OBJECTS, [ALL] * 3, by_object=True) as made:
        for number, row in enumerate(made):
            with_terms(row, headers=digest_of(["damaged" if number == 1 else "as stored"]))
        run_all(made)
        assert all("from the same objects" in str(row.error) for row in made)
        kinds = {type(row.error) for row in made}
        assert kinds <= {ChecksumMismatchError, PeerError}


def test_headers_are_not_compared_with_a_rank_that_does_not_look() -> None:
    with ranks(OBJECTS, [ALL] * 2, by_object=True) as made:
        with_terms(made[0], headers=digest_of(["as stored"]))
        run_all(made)
        all_is_right(made)


def test_a_rank_without_verification_among_others_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ranks(OBJECTS, [ALL] * 2, by_object=True) as made:
        with_terms(made[1], by_object=False)
        with caplog.at_level(logging.WARNING):
            run_all(made)
        all_is_right(made)
    assert "what rank 1 fetches is not compared: it has no FASTLOAD_VERIFY" in caplog.text


def test_objects_are_divided_among_those_who_compare_them() -> None:
    some = [(IDS[0], 0, 100), (IDS[1], 0, 100)]
    with ranks(OBJECTS, [some] * 3, by_object=True) as made:
        run_all(made)
        all_is_right(made)
        own = [set(IDS) - row.exchange.objects_of_others() for row in made]
    # Two have an owner; the third, which nobody needs, has one all the same.
    assert sorted(one.uri for part in own for one in part) == sorted(one.uri for one in IDS)


def test_smaller_slots_of_one_rank_are_what_all_chunks_fit_in() -> None:
    with ranks(OBJECTS, [ALL] * 3) as made:
        with_terms(made[2], chunk_bytes=CHUNK_BYTES // 4)
        run_all(made)
        all_is_right(made)
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
