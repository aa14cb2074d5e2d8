"""The scheduler's timelines where requests are slow: hedges, kills, whoever wins."""

from __future__ import annotations

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange
from fastload_common.transfer.hedging import Verdict
from fastload_common.transfer.lanes import Failed, Restarted
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.run import Run
from tests.common.transfer.scheduler_harness import Bench, chunk

POLICY = TransferPolicy(2, 3, 5, 5, backoff_base_s=1.0, progress_bytes=1000)


def ranges(bench: Bench) -> list[tuple[int, int]]:
    return [(a.byte_range.start, a.byte_range.end) for a in bench.lanes.all]


def hedged(bench: Bench, now_s: float) -> None:
    """Let the judge ask for hedges once."""
    bench.verdicts.always = Verdict.HEDGE
    bench.at(now_s)
    bench.verdicts.always = Verdict.WAIT


def test_time_in_the_queue_is_not_judged() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(100.0)
    assert bench.verdicts.seen == []
    bench.at(100.0, bench.started(1))
    bench.at(101.0)
    flight, idle = bench.verdicts.seen[-1]
    assert (flight.started_s, flight.last_progress_s, idle) == (100.0, 100.0, True)


def test_a_hedge_asks_for_what_is_missing_in_memory_of_its_own_and_wins() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 2000))
    hedged(bench, 2.0)
    hedge = bench.lanes.all[1]
    assert hedge.byte_range == ByteRange(2000, 5000)
    assert hedge.urgent
    assert hedge.position_bytes == bench.memory.slot_bytes  # the second slot
    bench.at(3.0, bench.done(2))
    # The loser may still write where the bytes must go.
    assert bench.lanes.cancelled == [1]
    assert bench.arrived() == []
    bench.at(3.1, bench.failed(1, good_bytes=2500))
    (filled,) = bench.arrived()
    filled.release()
    assert bench.memory.leased == {}
    snapshot = bench.stats.snapshot()
    assert (snapshot["hedges"], snapshot["hedges_won"]) == (1, 1)
    assert snapshot["hedge_bytes_wasted"] == 500


def test_a_primary_that_wins_delivers_at_once_and_the_hedge_is_closed() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1))
    hedged(bench, 2.0)
    bench.at(3.0, bench.done(1))
    (filled,) = bench.arrived()
    filled.release()
    assert bench.lanes.cancelled == [2]
    assert len(bench.memory.leased) == 1
    assert not bench.run.idle.is_set()
    bench.at(3.1, bench.failed(2, good_bytes=100))
    assert bench.memory.leased == {}
    assert bench.run.idle.is_set()
    assert bench.stats.snapshot()["hedges_won"] == 0


def test_a_primary_that_fails_leaves_it_to_the_hedge() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 1000))
    hedged(bench, 2.0)
    bench.at(3.0, bench.failed(1, good_bytes=1500))
    bench.at(30.0)
    assert len(bench.lanes.all) == 2  # nothing is asked a third time
    bench.at(31.0, bench.done(2))
    assert len(bench.arrived()) == 1
    assert bench.run.idle.is_set()


def test_what_a_failed_hedge_has_brought_is_not_asked_again() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 1000))
    hedged(bench, 2.0)
    bench.at(3.0, bench.failed(1, good_bytes=1500))
    bench.at(4.0, bench.failed(2, good_bytes=3000))
    bench.at(9.0)
    assert ranges(bench)[2:] == [(4000, 5000)]
    bench.at(10.0, bench.done(3))
    assert len(bench.arrived()) == 1


def test_both_done_in_one_batch_count_once() -> None:
    bench = Bench([chunk(0, 5000), chunk(5000, 6000)], policy=POLICY)
    bench.at(1.0, bench.started(1))
    hedged(bench, 2.0)
    hedge_id = bench.lanes.all[-1].id
    bench.at(3.0, bench.done(hedge_id), bench.done(1))
    (filled,) = bench.arrived()
    filled.release()
    assert len(bench.memory.leased) == 1


def test_a_killed_request_is_asked_again_at_once_on_a_new_connection() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 2000))
    bench.verdicts.always = Verdict.KILL
    bench.at(6.0)
    bench.verdicts.always = Verdict.WAIT
    assert bench.lanes.cancelled == [1]
    bench.at(6.1, bench.failed(1, good_bytes=2000))
    assert ranges(bench)[1:] == [(2000, 5000)]
    assert bench.lanes.all[1].fresh
    assert bench.stats.snapshot()["kills"] == 1


def test_a_store_that_always_stalls_ends_in_an_error_that_says_so() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.verdicts.always = Verdict.KILL
    now_s = 0.0
    for number in (1, 2, 3):
        now_s += 10.0
        bench.at(now_s)
        bench.at(now_s, bench.started(number))
        bench.at(now_s + 5.0)
        bench.at(now_s + 5.0, bench.failed(number))
    with pytest.raises(SourceUnavailableError, match=r"no byte came for 5\.0 s"):
        bench.run.next_filled()


def test_without_memory_for_a_hedge_what_is_silent_is_killed() -> None:
    bench = Bench([chunk(0, 5000)], slots=1, policy=POLICY)
    bench.at(1.0, bench.started(1))
    hedged(bench, 2.0)
    assert bench.lanes.cancelled == [1]


def test_a_consumer_that_leaves_during_a_race_gets_all_memory_back() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 10))
    hedged(bench, 2.0)
    bench.at(3.0, bench.done(2))
    bench.run.halt()
    bench.at(3.1)
    bench.at(3.2, bench.failed(1))
    assert bench.memory.leased == {}
    assert bench.run.idle.is_set()


def test_what_ignores_its_end_is_left_behind_and_gives_its_memory_back_later() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.run.halt()
    bench.at(1.0)
    second = Run([chunk(5000, 6000)], bench.clock)
    bench.scheduler.begin(second)
    bench.at(2.0)
    bench.at(3.0, bench.done(2))
    assert second.idle.is_set()
    assert len(bench.memory.leased) == 2  # the first one's, and what the consumer holds
    bench.at(4.0, bench.done(1))
    assert len(bench.memory.leased) == 1


def test_what_a_discarded_reply_brought_is_not_believed() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 4000))
    bench.at(2.0, Restarted(1, 2.0))
    bench.at(3.0, bench.failed(1, good_bytes=10))
    bench.at(9.0)
    assert ranges(bench)[1:] == [(10, 5000)]


def test_a_hedge_beyond_a_restarted_primary_does_not_hide_a_hole() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1), bench.progress(1, 4000))
    hedged(bench, 2.0)
    bench.at(3.0, Restarted(1, 3.0))
    bench.at(4.0, bench.done(2))
    bench.at(4.1, bench.failed(1, good_bytes=100))
    bench.at(9.0)
    assert bench.arrived() == []
    assert ranges(bench)[2:] == [(100, 5000)]
    bench.at(10.0, bench.done(3))
    assert len(bench.arrived()) == 1


def test_a_run_that_was_never_told_to_end_gives_nothing_to_the_next_one() -> None:
    bench = Bench([chunk(k * 100, k * 100 + 100) for k in range(9)], policy=POLICY)
    second = Run([chunk(5000, 6000)], bench.clock)
    bench.run.halt()
    bench.scheduler.begin(second)  # the pump was busy, and has not looked at the first since
    bench.at(1.0)
    assert ranges(bench)[3:] == [(5000, 6000)]
    bench.at(2.0, *[bench.done(attempt_id) for attempt_id in (1, 2, 3, 4)])
    assert second.next_filled().chunk == chunk(5000, 6000)
    assert second.idle.is_set()
    assert len(bench.memory.leased) == 1


def test_without_memory_for_a_hedge_a_request_is_killed_once_only() -> None:
    bench = Bench([chunk(0, 5000)], slots=1, policy=POLICY)
    bench.at(1.0, bench.started(1))
    hedged(bench, 2.0)
    bench.at(2.1, bench.failed(1))
    bench.at(2.2, bench.started(2))
    hedged(bench, 9.0)
    assert bench.lanes.cancelled == [1]  # the store may be one that takes its time


def test_a_store_that_only_drips_fails_in_the_end() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.verdicts.always = Verdict.KILL
    now_s, number = 0.0, 0
    while not bench.run.is_over:
        number += 1
        now_s += 3.0
        bench.at(now_s)
        bench.at(now_s, bench.started(number))
        bench.at(now_s + 0.01)
        bench.at(now_s + 0.01, bench.progress(number, 1))
        bench.at(now_s + 0.1)
        bench.at(now_s + 0.1, bench.failed(number, good_bytes=1))
    assert number < 12
    with pytest.raises(SourceUnavailableError, match="too slowly"):
        bench.run.next_filled()


def test_a_request_whose_receiver_died_is_not_to_blame() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    for number in range(1, 6):
        bench.at(number * 10.0)
        event = bench.failed(number)
        bench.at(number * 10.0, Failed(number, event.at_s, event.error, innocent=True))
    assert not bench.run.is_over


def test_a_hedge_that_is_refused_leaves_it_to_the_primary() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.started(1))
    hedged(bench, 2.0)
    bench.at(3.0, bench.failed(2, error=AccessDeniedError("one address of many")))
    assert not bench.run.is_over
    bench.at(4.0, bench.done(1))
    assert len(bench.arrived()) == 1


def test_a_cap_on_bandwidth_holds_for_hedges_too() -> None:
    policy = TransferPolicy(2, 3, 5, 5, max_bytes_per_s=1000.0, burst_bytes=5000)
    bench = Bench([chunk(0, 5000)], policy=policy)
    bench.at(1.0, bench.started(1))
    hedged(bench, 2.0)
    assert len(bench.lanes.all) == 1


def test_what_fell_silent_is_called_silent_however_short_the_patience() -> None:
    bench = Bench([chunk(0, 5000)], policy=TransferPolicy(2, 1, 5, 0.5))
    bench.at(1.0)
    bench.at(1.0, bench.started(1), bench.progress(1, 10))
    bench.verdicts.always = Verdict.KILL
    bench.at(1.6)
    bench.at(1.7, bench.failed(1, good_bytes=10))
    with pytest.raises(SourceUnavailableError, match=r"no byte came for 0\.6 s"):
        bench.run.next_filled()
