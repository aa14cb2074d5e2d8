"""The thread that fetches for all ranks: it ends when it is told, whatever it waits for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from fastload_common.clock import SystemClock
from fastload_common.exchange.feeder import Feeder
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.transfer.run import Run

CHUNKS = [Chunk(ObjectId("s3://models/m/0", '"0"', 100), ByteRange(k, k + 1), 1) for k in range(3)]


class Given:
    """A chunk that tells when it was given back."""

    position_bytes = 0
    data = memoryview(b"")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.released = False

    def release(self) -> None:
        self.released = True


def test_a_fetch_that_waits_is_aborted() -> None:
    aborted = threading.Event()
    ended: list[BaseException | None] = []

    def fetch(chunks: Iterable[Chunk]) -> Iterator[Given]:
        assert aborted.wait(20)
        if aborted.is_set():
            raise RuntimeError("aborted")
        yield Given(CHUNKS[0])

    feeder = Feeder(fetch, CHUNKS, lambda filled: None, ended.append)
    assert feeder.stop(aborted.set)
    assert [type(error) for error in ended] == [RuntimeError]


def test_what_comes_after_the_end_is_given_back_and_its_fetch_closed() -> None:
    first, stopping, closed = threading.Event(), threading.Event(), threading.Event()
    given = [Given(chunk) for chunk in CHUNKS]
    shared: list[Any] = []

    def fetch(chunks: Iterable[Chunk]) -> Iterator[Given]:
        try:
            yield given[0]
            first.set()
            assert stopping.wait(20)
            yield given[1]
            yield given[2]
        finally:
            closed.set()

    feeder = Feeder(fetch, CHUNKS, shared.append, lambda error: None)
    assert first.wait(20)
    assert feeder.stop(stopping.set)
    assert shared == [given[0]]
    assert [one.released for one in given] == [False, True, False]
    assert closed.is_set()


def test_a_fetch_whose_wake_up_was_taken_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`Fetcher.close` by another thread drops what was not delivered, and the wake-up with it."""
    run = Run(CHUNKS, SystemClock())

    class Stolen:
        def put(self, item: object) -> None:
            pass

        def get(self, timeout: float) -> object:
            run.fail(RuntimeError("closed"))
            raise queue.Empty

    monkeypatch.setattr(run, "_results", Stolen())
    with pytest.raises(RuntimeError, match="closed"):
        run.next_filled()
