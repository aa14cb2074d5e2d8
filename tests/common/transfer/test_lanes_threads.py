"""Threads with receivers that misbehave as no connection of ours does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receipt, Receiver
from fastload_common.testing.scripted_source import Fault, ScriptedSource
from fastload_common.transfer.lanes import Done, Failed, Started
from tests.common.transfer.lanes_bench import LanesBench, content

DATA = content(20_000)


def bench_of(source: ScriptedSource, **options: Any) -> LanesBench:
    return LanesBench(source, "threads", **options)


def test_a_stalled_receiver_is_aborted_and_used_no_more() -> None:
    source = ScriptedSource({"a": DATA}, {("a", 100): [Fault(stalls=True, good_bytes=40)]})
    bench = bench_of(source, connections=1)
    first = bench.start(source.object_id("a"), 0, 100)
    bench.started(first)
    bench.lanes.cancel(first)
    failure = bench.failure(first)
    assert failure.cancelled
    assert isinstance(failure.error, SourceError)
    assert failure.error.received_bytes == 40
    # It was closed before the end was told.
    assert source.receivers_open == 0
    assert isinstance(bench.end_of(bench.start(source.object_id("a"), 0, 100)), Done)
    bench.close()
    assert source.receivers_opened == 2
    assert source.receivers_open == 0


class Deaf:
    """A receiver that heeds only its third abort."""

    def __init__(self) -> None:
        self.aborts = 0
        self.ended = threading.Event()

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        assert self.ended.wait(30)
        raise SourceUnavailableError("aborted at last")

    def abort(self) -> None:
        self.aborts += 1
        if self.aborts == 3:
            self.ended.set()

    def close(self) -> None:
        self.ended.set()


def opened_by(
    monkeypatch: pytest.MonkeyPatch, source: ScriptedSource, opener: Callable[[], Receiver]
) -> LanesBench:
    monkeypatch.setattr(source, "open_receiver", opener)
    return bench_of(source, connections=1)


def test_aborts_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    source, deaf = ScriptedSource({"a": DATA}), Deaf()
    bench = opened_by(monkeypatch, source, lambda: deaf)
    attempt_id = bench.start(source.object_id("a"), 0, 100)
    bench.started(attempt_id)
    bench.lanes.cancel(attempt_id)
    assert bench.failure(attempt_id).cancelled
    assert deaf.aborts >= 3
    bench.close()


def test_closing_says_which_thread_did_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, deaf = ScriptedSource({"a": DATA}), Deaf()
    deaf.aborts = 1000
    bench = opened_by(monkeypatch, source, lambda: deaf)
    attempt_id = bench.start(source.object_id("a"), 0, 100)
    bench.started(attempt_id)
    with caplog.at_level(logging.WARNING):
        bench.lanes.close()
    assert "fastload-receive-0 did not end" in caplog.text
    deaf.ended.set()
    assert bench.mailbox.wait(0.2) == []
    bench.close()


@pytest.mark.parametrize(
    "error",
    [AccessDeniedError("no"), SourceUnavailableError("not now"), OSError("odd"), SystemExit()],
)
def test_what_opening_raises_is_the_attempts_failure(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def refuse() -> Receiver:
        raise error

    source = ScriptedSource({"a": DATA})
    bench = opened_by(monkeypatch, source, refuse)
    for _ in range(2):
        failure = bench.failure(bench.start(source.object_id("a"), 0, 100))
        assert failure.error is error
        assert not failure.cancelled
    bench.close()


@pytest.mark.parametrize(("claimed", "counted"), [(-5, 0), (1_000_000, 100)])
def test_a_count_beyond_what_was_asked_is_not_believed(claimed: int, counted: int) -> None:
    source = ScriptedSource({"a": DATA}, {("a", 100): [Fault(claimed_bytes=claimed)]})
    bench = bench_of(source)
    error = bench.failure(bench.start(source.object_id("a"), 0, 100)).error
    assert isinstance(error, SourceError)
    assert error.received_bytes == counted
    bench.close()


def test_a_receipt_of_other_bytes_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ScriptedSource({"a": DATA})
    receiver = source.open_receiver()
    monkeypatch.setattr(
        receiver, "receive", lambda *_: Receipt(99, first_byte_s=0, total_s=0, new_connection=True)
    )
    bench = opened_by(monkeypatch, source, lambda: receiver)
    failure = bench.failure(bench.start(source.object_id("a"), 0, 100))
    assert type(failure.error) is RangeMismatchError
    bench.close()


def test_threads_that_cannot_start_are_the_attempts_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = ScriptedSource({"a": DATA})
    bench = bench_of(source)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        failure = bench.failure(bench.start(source.object_id("a"), 0, 100))
    assert "can't start" in str(failure.error)
    assert isinstance(bench.end_of(bench.start(source.object_id("a"), 0, 100)), Done)
    bench.close()


def test_many_attempts_and_cancels_in_any_order_each_end_once() -> None:
    gate = threading.Event()
    source = ScriptedSource({"a": DATA}, gate=gate)
    bench = bench_of(source, connections=3, slots=40)
    ids = [bench.start(source.object_id("a"), n, n + 100) for n in range(40)]
    for attempt_id in ids[::3]:
        bench.lanes.cancel(attempt_id)
    gate.set()
    for attempt_id in ids:
        end = bench.end_of(attempt_id)
        assert isinstance(end, Done) or end.cancelled
    assert len(bench.events) - sum(isinstance(e, Started) for e in bench.events) == 40
    assert sum(isinstance(e, Failed) for e in bench.events) <= len(ids[::3])
    assert source.peak_in_flight <= 3
    bench.close()
    assert source.receivers_open == 0
