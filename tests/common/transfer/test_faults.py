"""Retries, back-off, deadline, aborts: what happens when requests fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    DeadlineError,
    ObjectChangedError,
    RangeMismatchError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange
from fastload_common.source.base import Receipt
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.scripted_source import Fault, ScriptedReceiver, ScriptedSource
from tests.common.transfer.lanes_bench import until
from tests.common.transfer.transfer_bench import MakeFetcher, content, receiving_threads

STALL = Fault(stalls=True)
DENIED = Fault(AccessDeniedError)


def ranges(source: ScriptedSource) -> list[tuple[int, int]]:
    return [(r.byte_range.start, r.byte_range.end) for r in source.requests]


def test_s16_only_the_missing_bytes_are_asked_again(make: MakeFetcher) -> None:
    script = [Fault(good_bytes=400), Fault(good_bytes=0), Fault(good_bytes=599)]
    bench = make(ScriptedSource({"a": content(1000)}, {("a", 1000): script}))
    chunks = bench.chunks()
    assert bench.read(chunks) == bench.expected(chunks)
    assert ranges(bench.source) == [(0, 1000), (400, 1000), (400, 1000), (999, 1000)]
    assert {request.object_id for request in bench.source.requests} == {chunks[0].object_id}
    found = bench.stats.snapshot()
    assert (found["requests"], found["retries"]) == (4, 3)
    assert (found["bytes_received"], found["bytes_refetched"]) == (1000, 600)
    assert found["errors"] == {"SourceUnavailableError": 3}


def test_s16_a_reset_after_the_last_byte_needs_no_request(make: MakeFetcher) -> None:
    script = [Fault(good_bytes=1000)]
    bench = make(ScriptedSource({"a": content(1000)}, {("a", 1000): script}))
    assert bench.read(bench.chunks()) == bench.expected(bench.chunks())
    assert ranges(bench.source) == [(0, 1000)]


@pytest.mark.parametrize("claimed_bytes", [5000, -3])
def test_a_wrong_count_of_good_bytes_never_leaves_the_range(
    make: MakeFetcher, claimed_bytes: int
) -> None:
    script = [Fault(good_bytes=1000, claimed_bytes=claimed_bytes)]
    bench = make(ScriptedSource({"a": content(3000)}, {("a", 1000): script}))
    assert bench.read(bench.chunks()) == bench.expected(bench.chunks())
    assert all(0 <= start < end <= 3000 for start, end in ranges(bench.source))


def test_attempts_without_progress_end_the_fetch(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(1000)}, {("a", 1000): [Fault(good_bytes=9)] * 9}))
    with pytest.raises(SourceUnavailableError) as caught:
        bench.read(bench.chunks())
    assert len(bench.source.requests) == 3
    assert caught.value.fields["attempts"] == 3
    assert caught.value.__notes__ == [
        "while fetching [0, 1000) of s3://bucket/model/a: 27 of 1000 bytes had arrived "
        "after 3 attempts"
    ]


def test_attempts_with_progress_do_not_count(make: MakeFetcher) -> None:
    script = [Fault(good_bytes=100)] * 9
    bench = make(ScriptedSource({"a": content(1000)}, {("a", 1000): script}))
    assert bench.read(bench.chunks()) == bench.expected(bench.chunks())
    assert len(bench.source.requests) == 10


def test_progress_does_not_forgive_earlier_failures(make: MakeFetcher) -> None:
    script = [Fault(), Fault(good_bytes=200), Fault(), Fault(good_bytes=200), Fault()]
    bench = make(ScriptedSource({"a": content(1000)}, {("a", 1000): script}))
    with pytest.raises(SourceUnavailableError):
        bench.read(bench.chunks())
    assert len(bench.source.requests) == 5


@pytest.mark.parametrize("kind", [AccessDeniedError, ObjectChangedError, RangeMismatchError])
def test_a_permanent_error_is_raised_with_its_type_after_one_attempt(
    make: MakeFetcher, kind: type[AccessDeniedError]
) -> None:
    bench = make(ScriptedSource({"a": content(9000)}, {("a", 3000): [Fault(kind)]}))
    with pytest.raises(kind) as caught:
        bench.read(bench.chunks())
    assert caught.value.fields["attempts"] == 1
    assert ranges(bench.source).count((2000, 3000)) == 1


@pytest.mark.parametrize("error", [MemoryError("no"), ZeroDivisionError("bug"), SystemExit(3)])
def test_no_error_of_a_thread_is_lost(make: MakeFetcher, error: BaseException) -> None:
    bench = make(ScriptedSource({"a": content(9000)}, {("a", 3000): [Fault(error)]}))
    with pytest.raises(type(error)) as caught:
        bench.read(bench.chunks())
    assert caught.value is error


def test_a_source_that_cannot_connect_is_retried_and_then_raised(
    make: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(ScriptedSource({"a": content(1000)}))
    asked: list[int] = []

    def refuse() -> ScriptedReceiver:
        asked.append(1)
        raise SourceUnavailableError("connection refused")

    monkeypatch.setattr(bench.source, "open_receiver", refuse)
    with pytest.raises(SourceUnavailableError, match="connection refused"):
        bench.read(bench.chunks())
    assert len(asked) == 3


def test_a_receiver_that_fills_too_little_is_an_error_and_never_data(
    make: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(ScriptedSource({"a": content(1000)}))
    monkeypatch.setattr(
        ScriptedReceiver, "receive", lambda *_: Receipt(999, 0.1, 0.1, new_connection=False)
    )
    with pytest.raises(RangeMismatchError, match="filled 999 of 1000 bytes"):
        bench.read(bench.chunks())


def test_further_failures_are_notes_of_the_first(make: MakeFetcher) -> None:
    gate = threading.Event()
    faults = {
        ("a", end): [Fault(kind)]
        for end, kind in (
            (1000, AccessDeniedError),
            (2000, ObjectChangedError),
            (3000, RangeMismatchError),
        )
    }
    bench = make(ScriptedSource({"a": content(3000)}, faults, gate=gate))
    running = bench.fetcher.fetch(bench.chunks())
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            next(running)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    for _ in range(3):
        assert bench.source.request_began.acquire(timeout=10)
    gate.set()
    thread.join(10)
    [error] = errors
    said = "\n".join([type(error).__name__, *error.__notes__])
    for kind in (AccessDeniedError, ObjectChangedError, RangeMismatchError):
        assert said.count(kind.__name__) == 1


def test_after_an_error_the_fetcher_can_be_used_again(make: MakeFetcher) -> None:
    bench = make(
        ScriptedSource({"a": content(9000)}, {("a", 1000): [DENIED], ("a", 9000): [STALL]})
    )
    with pytest.raises(AccessDeniedError):
        bench.read(bench.chunks())
    assert bench.arena.leased_count == 0
    bench.source._faults.clear()
    assert bench.read(bench.chunks()) == bench.expected(bench.chunks())


def close_it(bench: object) -> None:
    """The consumer has seen enough."""


def interrupt(bench: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("leave", [close_it, interrupt])
def test_a_consumer_that_leaves_stops_everything_within_a_second(
    make: MakeFetcher, leave: Callable[[object], None]
) -> None:
    faults = {("a", end): [STALL] for end in range(2000, 9001, 1000)}
    bench = make(ScriptedSource({"a": content(9000)}, faults), concurrency=8, slots=8)
    began_s = time.monotonic()
    try:
        for filled in bench.fetcher.fetch(bench.chunks()):
            filled.release()
            leave(bench)
            break
    except KeyboardInterrupt:
        pass
    assert time.monotonic() - began_s < 10  # not as long as the stall
    assert bench.arena.leased_count == 0
    assert bench.source.receivers_open == 0  # what was aborted is not used again
    # Those of an earlier test may still be ending. One for each connection that was needed; the one
    # that aborts is none of them.
    until(
        lambda: len([name for name in receiving_threads() if not name.endswith("-abort")]) <= 8,
        "at most eight threads",
    )


def test_a_request_that_ignores_its_abort_is_left_behind_and_gives_its_slot_back(
    make: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(ScriptedSource({"a": content(2000)}, {("a", 2000): [STALL]}))
    really_abort = ScriptedReceiver.abort
    deaf: list[ScriptedReceiver] = []
    monkeypatch.setattr(ScriptedReceiver, "abort", lambda receiver: deaf.append(receiver))
    running = bench.fetcher.fetch(bench.chunks())
    next(running).release()
    for _ in range(2):
        assert bench.source.request_began.acquire(timeout=10)
    began_s = time.monotonic()
    running.close()
    assert time.monotonic() - began_s < 5  # not as long as the stall
    assert bench.arena.leased_count == 1
    really_abort(deaf[0])
    bench.fetcher.close()
    assert bench.arena.leased_count == 0


def test_leaving_does_not_wait_for_a_back_off(make: MakeFetcher) -> None:
    script = [Fault(retry_after_s=50)]
    bench = make(ScriptedSource({"a": content(2000)}, {("a", 2000): script}))
    running = bench.fetcher.fetch(bench.chunks())
    next(running).release()
    for _ in range(2):
        assert bench.source.request_began.acquire(timeout=10)
    running.close()
    assert bench.arena.leased_count == 0
    assert len(bench.source.requests) == 2


def test_a_stalled_request_ends_at_the_deadline(make: MakeFetcher) -> None:
    clock = FakeClock()
    bench = make(
        ScriptedSource({"a": content(3000)}, {("a", 3000): [STALL]}), clock=clock, deadline_s=30
    )
    running = bench.fetcher.fetch(bench.chunks())
    for _ in range(2):
        next(running).release()
    clock.advance(29.9)
    error: list[BaseException] = []

    def consume() -> None:
        try:
            next(running)
        except BaseException as caught:
            error.append(caught)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    clock.advance(0.2)
    thread.join(10)
    assert isinstance(error[0], DeadlineError)
    assert "2 of 3 ranges (2.0 KiB of 2.9 KiB)" in str(error[0])
    assert bench.arena.leased_count == 0


def test_a_deadline_that_is_past_sends_nothing(make: MakeFetcher) -> None:
    clock = FakeClock()
    bench = make(ScriptedSource({"a": content(3000)}), clock=clock, deadline_s=30)
    clock.advance(30)
    with pytest.raises(DeadlineError):
        bench.read(bench.chunks())
    assert bench.source.requests == []


def test_a_range_in_hand_is_given_out_even_after_the_deadline(make: MakeFetcher) -> None:
    clock = FakeClock()
    bench = make(ScriptedSource({"a": content(2000)}), clock=clock, deadline_s=30)
    running = bench.fetcher.fetch(bench.chunks())
    first = next(running)
    while bench.stats.snapshot()["bytes_received"] < 2000:
        time.sleep(0.001)
    clock.advance(100)
    second = next(running)
    assert {first.chunk.byte_range, second.chunk.byte_range} == {
        ByteRange(0, 1000),
        ByteRange(1000, 2000),
    }
    first.release()
    second.release()
