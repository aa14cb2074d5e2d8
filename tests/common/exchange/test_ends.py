"""A rank fails, or is gone, at each stage of the exchange: how all others end."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable

import pytest

from fastload_common.errors import PeerError, SourceUnavailableError
from fastload_common.exchange.words import Word
from tests.common.exchange.node_harness import (
    CHUNK_BYTES,
    Rank,
    make_objects,
    ranks,
    read_of,
    run_all,
)

OBJECTS = make_objects(2, 12 * CHUNK_BYTES)
ALL = [(one, 0, one.size_bytes) for one in OBJECTS]

STAGES = ("at once", "told", "agreed", "first chunk", "all but one chunk", "all chunks", "left")
WAYS = ("failed", "gone")


class End(BaseException):
    """Ends a rank as a signal would."""


def ends_at(stage: str, way: str) -> Callable[[Rank], None]:
    """A rank that ends there."""

    def end(row: Rank) -> None:
        if way == "failed":
            raise SourceUnavailableError(f"failed {stage}")
        # What the kernel does with the sockets of a process that is killed.
        for line in row.exchange._peers.lines.values():
            line.peer.shutdown(socket.SHUT_RDWR)
        time.sleep(0.05)
        raise End

    def work(row: Rank) -> None:
        exchange = row.exchange
        reads = [read_of(*need) for need in row.needs]
        if stage == "at once":
            end(row)
        if stage == "told":
            from fastload_common.plan.needs import Needs

            terms = exchange._its_terms()
            exchange._tell(Needs.of(reads, terms.objects, gap_bytes=0).encode())
            end(row)
        exchange.agree(reads)
        if stage == "agreed":
            end(row)
        count = len(exchange._owners)
        for number, filled in enumerate(exchange.fetch()):
            if stage == "first chunk" or (stage == "all but one chunk" and number == count - 2):
                end(row)
            filled.release()
        if stage == "all chunks":
            end(row)
        exchange.leave()
        end(row)

    return work


@pytest.mark.parametrize(("stage", "way", "size"), list(itertools.product(STAGES, WAYS, (2, 4))))
def test_a_rank_ends(stage: str, way: str, size: int) -> None:
    with ranks(OBJECTS, [ALL] * size, slots=2) as made:
        works = [Rank.load] * (size - 1) + [ends_at(stage, way)]
        began_s = time.monotonic()
        run_all(made, works)
        for row in made[:-1]:
            assert row.ended_s - began_s < 5
            if row.error is None:
                assert row.got == {(one, s, e): OBJECTS[one][s:e] for one, s, e in ALL}
                assert stage in STAGES[4:]  # it owed nothing to this one any more
                continue
            assert isinstance(row.error, PeerError), row.error
            assert f"rank {size - 1} (pid" in str(row.error)
            told = f"failed {stage}" if way == "failed" else "without a word"
            assert told in str(row.error)
        if (stage, way) == ("left", "gone"):
            assert [row.error for row in made[:-1]] == [None] * (size - 1)
        assert [row.arena.leased_count for row in made[:-1]] == [0] * (size - 1)
    left = [t.name for t in threading.enumerate() if t.name.startswith("fastload")]
    assert left == []


def test_last_words_go_out_through_a_full_socket() -> None:
    """A peer that reads late hears why all the same."""
    with ranks(OBJECTS, [ALL] * 2) as made:
        talker, listener = made[0].exchange._peers, made[1].exchange._peers
        # The listener's thread is kept busy, so its socket fills.
        with listener.changed:
            talker.tell(Word.NEEDS, bytes(8 << 20))
            assert not talker.lines[1].outbox.is_empty
            closing = threading.Thread(
                target=made[0].exchange.end, args=(SourceUnavailableError("the cause"),)
            )
            closing.start()
        closing.join(10)
        with pytest.raises(PeerError, match="the cause"):
            listener.wait(lambda: False, list, "nothing")


def test_a_peer_that_never_reads_holds_up_an_end_for_a_second_only() -> None:
    with ranks(OBJECTS, [ALL] * 2) as made:
        talker, listener = made[0].exchange._peers, made[1].exchange._peers
        with listener.changed:
            talker.tell(Word.NEEDS, bytes(8 << 20))
            began_s = time.monotonic()
            made[0].exchange.end(SourceUnavailableError("the cause"))
            assert time.monotonic() - began_s < 4
        # What it had already is all it gets.
        with pytest.raises(PeerError):
            listener.wait(lambda: False, list, "nothing")


def test_an_end_is_an_end_once() -> None:
    with ranks(OBJECTS, [ALL] * 2) as made:
        run_all(made)
        for row in made:
            row.exchange.end()
            row.exchange.end(SourceUnavailableError("too late"))
            assert row.error is None


def test_a_session_that_loads_nothing_lets_the_others_load() -> None:
    def nothing(row: Rank) -> None:
        pass

    with ranks(OBJECTS, [ALL] * 3) as made:
        run_all(made, [Rank.load, nothing, Rank.load])
        assert [row.error for row in made] == [None] * 3


def test_a_generator_that_is_closed_early_is_no_failure() -> None:
    def has_enough(row: Rank) -> None:
        row.exchange.read_alone()
        raise GeneratorExit

    with ranks(OBJECTS, [ALL] * 2) as made:
        run_all(made, [Rank.load, has_enough])
        assert made[0].error is None
        assert made[0].got


def test_what_had_come_for_this_rank_alone_is_given_back() -> None:
    come = threading.Event()

    def takes_nothing(row: Rank) -> None:
        row.exchange.agree([read_of(*need) for need in row.needs])
        while row.arena.leased_count < 2:
            time.sleep(0.001)
        come.set()
        row.exchange._peers.wait(lambda: False, list, "the other's failure")

    def fails(row: Rank) -> None:
        row.exchange.agree([])
        come.wait(10)
        raise SourceUnavailableError("the cause")

    with ranks(OBJECTS, [ALL, []], slots=2) as made:
        run_all(made, [takes_nothing, fails])
        assert isinstance(made[0].error, PeerError)
        assert made[0].arena.leased_count == 0
