"""The scheduler's timelines: what is asked when, again, twice, or no more."""

from __future__ import annotations

import math

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    DeadlineError,
    ObjectChangedError,
    SourceUnavailableError,
    StagingError,
)
from fastload_common.transfer.lanes import Failed
from fastload_common.transfer.policy import TransferPolicy
from tests.common.transfer.scheduler_harness import Bench, chunk

POLICY = TransferPolicy(2, 3, 5, 5, backoff_base_s=1.0, progress_bytes=1000)


def ranges(bench: Bench) -> list[tuple[int, int]]:
    return [(a.byte_range.start, a.byte_range.end) for a in bench.lanes.all]


def test_requests_begin_in_order_with_a_backlog_and_no_more() -> None:
    bench = Bench([chunk(k * 100, k * 100 + 100) for k in range(9)], policy=POLICY)
    assert bench.lanes.limit == 2
    # Two on the wire, one that waits for a connection.
    assert ranges(bench) == [(0, 100), (100, 200), (200, 300)]
    bench.at(1.0, bench.done(2))
    assert ranges(bench)[3:] == [(300, 400)]
    assert [filled.chunk for filled in bench.arrived()] == [chunk(100, 200)]


def test_memory_bounds_what_is_asked_for_and_a_release_goes_on() -> None:
    bench = Bench([chunk(0, 10), chunk(10, 20), chunk(20, 30)], slots=2, policy=POLICY)
    assert len(bench.lanes.all) == 2
    assert bench.scheduler.starving
    bench.at(1.0, bench.done(1))
    assert len(bench.lanes.all) == 2
    (filled,) = bench.arrived()
    filled.release()
    bench.at(1.0)
    assert ranges(bench)[2:] == [(20, 30)]
    assert not bench.scheduler.starving


def test_an_attempt_that_has_ended_holds_no_memory() -> None:
    bench = Bench([chunk(0, 100), chunk(100, 200)], policy=POLICY)
    first, second = bench.lanes.all
    bench.at(1.0, bench.done(1), bench.failed(2))
    for attempt in (first, second):
        with pytest.raises(ValueError, match="released"):
            bytes(attempt.memory)


def test_s16_only_the_missing_bytes_are_asked_again_after_the_back_off() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    bench.at(1.0, bench.failed(1, good_bytes=500))
    assert bench.due_s == pytest.approx(0.5)  # half of the first second, full jitter
    bench.at(1.4)
    assert len(bench.lanes.all) == 1
    bench.at(1.5)
    assert ranges(bench)[1:] == [(500, 5000)]
    assert bench.lanes.all[1].fresh
    bench.at(2.0, bench.failed(2, good_bytes=4500))
    assert len(bench.arrived()) == 1  # everything is there: nothing more is asked
    assert bench.run.idle.is_set()


def test_s15_back_off_doubles_and_heeds_the_store() -> None:
    policy = TransferPolicy(4, 6, 5, 5, backoff_base_s=0.25)
    bench = Bench([chunk(0, 1000)], policy=policy)
    asked = [None, None, 7, None]
    now_s, waits_s = 0.0, []
    for number, retry_after_s in enumerate(asked, start=1):
        error = SourceUnavailableError("busy", retry_after_s=retry_after_s)
        bench.at(now_s, bench.failed(number, error=error))
        waits_s.append(bench.due_s)
        now_s += bench.due_s
        bench.at(now_s)
    assert waits_s == pytest.approx([0.125, 0.25, 7.5, 1.0])


def test_s15_endless_throttling_ends_at_the_deadline_and_says_why() -> None:
    policy = TransferPolicy(4, 100, 5, 5, backoff_base_s=0.25)
    bench = Bench([chunk(0, 1000)], policy=policy, deadline_s=30.0)
    now_s = 0.0
    while not bench.run.is_over:
        if bench.lanes.live:
            (attempt_id,) = bench.lanes.live
            error = SourceUnavailableError("SlowDown: please reduce your rate", status=503)
            bench.at(now_s, bench.failed(attempt_id, error=error))
        else:
            now_s += bench.due_s
            bench.at(now_s)
    assert 10 < now_s <= 30
    assert len(bench.lanes.all) < 15
    with pytest.raises(DeadlineError, match=r"after 30\.0 s: 0 of 1 ranges.*SlowDown"):
        bench.run.next_filled()


def test_attempts_without_progress_end_the_run_with_their_number() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY)
    for number, now_s in enumerate((1.0, 5.0, 9.0), start=1):
        bench.at(now_s)
        bench.at(now_s, bench.failed(number))
    with pytest.raises(SourceUnavailableError) as caught:
        bench.run.next_filled()
    assert caught.value.fields["attempts"] == 3
    assert "[0, 5000) of s3://bucket/object" in caught.value.__notes__[0]
    assert bench.memory.leased == {}
    assert bench.run.idle.is_set()


def test_attempts_with_progress_do_not_count() -> None:
    bench = Bench([chunk(0, 9000)], policy=POLICY)
    for number in range(1, 9):
        bench.at(number * 5.0)
        bench.at(number * 5.0, bench.failed(number, good_bytes=1000))
    bench.at(50.0)
    bench.at(50.0, bench.done(9))
    assert len(bench.arrived()) == 1


@pytest.mark.parametrize("kind", [AccessDeniedError, ObjectChangedError])
def test_a_permanent_error_ends_everything_at_once(kind: type[Exception]) -> None:
    bench = Bench([chunk(0, 10), chunk(10, 20), chunk(20, 30)], policy=POLICY)
    bench.at(1.0, bench.failed(2, error=kind("no")))
    assert bench.lanes.cancelled == [1, 3]
    assert not bench.run.idle.is_set()  # they may still write
    assert len(bench.memory.leased) == 2
    bench.at(1.1, bench.failed(1), bench.failed(3))
    assert bench.run.idle.is_set()
    assert bench.memory.leased == {}
    with pytest.raises(kind, match="no"):
        bench.run.next_filled()


def test_an_error_that_is_not_ours_is_raised_as_it_is() -> None:
    bench = Bench([chunk(0, 10)], policy=POLICY)
    bench.at(1.0, bench.failed(1, error=ZeroDivisionError("a fault")))
    with pytest.raises(ZeroDivisionError, match="a fault"):
        bench.run.next_filled()


def test_closed_memory_ends_the_run() -> None:
    bench = Bench([chunk(0, 10), chunk(10, 20)], slots=1, policy=POLICY)
    bench.memory.is_closed = True
    bench.at(1.0)
    bench.at(1.0, bench.done(1))
    with pytest.raises(StagingError):
        bench.run.next_filled()


def test_the_deadline_ends_it_and_names_the_last_fault() -> None:
    bench = Bench([chunk(0, 5000), chunk(5000, 6000)], policy=POLICY, deadline_s=10.0)
    bench.at(1.0, bench.failed(1, error=SourceUnavailableError("SlowDown", status=503)))
    bench.at(10.0)
    assert set(bench.lanes.cancelled) >= {2}
    with pytest.raises(DeadlineError, match=r"0 of 2 ranges.*SlowDown"):
        bench.run.next_filled()


def test_a_back_off_beyond_the_deadline_ends_it_at_once() -> None:
    bench = Bench([chunk(0, 5000)], policy=POLICY, deadline_s=10.0)
    bench.at(9.8, bench.failed(1, error=SourceUnavailableError("late", status=503)))
    with pytest.raises(DeadlineError):
        bench.run.next_filled()


def test_throttling_lowers_the_number_of_requests() -> None:
    policy = TransferPolicy(8, 5, 5, 5)
    bench = Bench([chunk(k * 10, k * 10 + 10) for k in range(50)], slots=50, policy=policy)
    assert bench.lanes.limit == 8
    bench.at(1.0, bench.failed(1, error=SourceUnavailableError("SlowDown", status=503)))
    assert bench.lanes.limit == 4


def refused(bench: Bench, attempt_id: int) -> Failed:
    return bench.failed(attempt_id, error=SourceUnavailableError("SlowDown", status=503))


def test_while_a_store_is_given_a_pause_nobody_looks_for_work() -> None:
    bench = Bench([chunk(k * 10, k * 10 + 10) for k in range(5)], policy=TransferPolicy(4, 5, 5, 5))
    bench.at(1.0, *[refused(bench, attempt_id) for attempt_id in list(bench.lanes.live)])
    for now_s in (1.0, 1.5, 1.9):  # their back-off was over at 1.125
        bench.at(now_s)
        assert bench.due_s == pytest.approx(2.0 - now_s)
    assert bench.lanes.live == {}
    bench.at(2.0)
    assert bench.lanes.live


def test_while_all_connections_are_in_use_nobody_looks_for_work() -> None:
    policy = TransferPolicy(8, 5, 5, 5, hedging=False)
    bench = Bench([chunk(k * 10, k * 10 + 10) for k in range(50)], slots=50, policy=policy)
    bench.at(1.0, refused(bench, 1))
    bench.at(1.5)
    assert len(bench.lanes.live) == 9 > bench.lanes.limit
    assert bench.due_s == math.inf
