"""Faults among ranks of one process, where they are exact: one first error, named by all."""

from __future__ import annotations

import gc
import logging
import mmap
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import pytest

from fastload_common.errors import (
    ChecksumMismatchError,
    DeadlineError,
    FastloadError,
    ObjectChangedError,
    OutOfBudgetError,
    PeerError,
    SourceUnavailableError,
)
from fastload_common.exchange import node_exchange
from fastload_common.exchange.part import Part, part_of
from fastload_common.exchange.peers import Peers
from fastload_common.exchange.terms import digest_of
from fastload_common.exchange.words import FILLED_FORM, TAKEN_FORM, Word
from fastload_common.plan.node import NodePlan
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


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_who_is_waited_for_is_said_every_30_s(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()

    with ranks(OBJECTS, [ALL] * 2, clock=clock) as made, caplog.at_level(logging.WARNING):
        waiters: Any = made[0].exchange._peers.changed

        def tells_late(row: Rank) -> None:
            until(lambda: made[0].exchange._told and bool(waiters._waiters))
            for count in range(3):
                clock.advance(31)
                until(lambda count=count: len(caplog.records) > count)  # type: ignore[misc]
            row.load()

        run_all(made, [Rank.load, tells_late])
        all_is_right(made, OBJECTS)
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
        (Word.FAILED, b"[" * 200_000),
        (77, b""),
    ]:

        def speaks(row: Rank, word: int = word, payload: bytes = payload) -> None:
            row.exchange._peers.tell(word, payload)  # type: ignore[arg-type]
            row.load()

        with ranks(OBJECTS, [ALL] * 2) as made:
            run_all(made, [Rank.load, speaks])
            assert isinstance(made[0].error, PeerError), word
            assert "rank 1" in str(made[0].error)
            # The one that spoke hears it, too.
            assert str(made[1].error) == str(made[0].error)
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
        all_is_right(made, OBJECTS)


def test_a_rank_without_verification_among_others_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ranks(OBJECTS, [ALL] * 2, by_object=True) as made:
        with_terms(made[1], by_object=False)
        with caplog.at_level(logging.WARNING):
            run_all(made)
        all_is_right(made, OBJECTS)
    assert "what rank 1 fetches is not compared: it has no FASTLOAD_VERIFY" in caplog.text


def test_the_end_of_the_thread_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Peers, *args: object) -> None:
        raise MemoryError

    with ranks(OBJECTS, [ALL] * 2) as made:
        monkeypatch.setattr(Peers, "_turn", fails)
        with pytest.raises(FastloadError, match="has ended: MemoryError"):
            made[0].exchange._peers.wait(lambda: False, list, "nothing")


def test_a_rank_that_leaves_owing_a_chunk_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the plans of two ranks differ: rank 1's lacks its last chunk."""
    real = part_of

    def skewed(
        plan: NodePlan, objects: Sequence[ObjectId], those: Sequence[int], rank: int
    ) -> Part:
        part = real(plan, objects, those, rank)
        if rank == 1:
            lost = max(part.takers)
            for table in (part.takers, part.chunks, part.owners):
                del table[lost]
        return part

    monkeypatch.setattr(node_exchange, "part_of", skewed)
    with ranks(OBJECTS, [ALL] * 2) as made:
        run_all(made, timeout_s=15)
        assert isinstance(made[0].error, PeerError)
        assert "rank 1" in str(made[0].error)
        assert "it left without chunk" in str(made[0].error)
