"""Attempts as the lanes know them, and threads for calls that may block."""

from __future__ import annotations

import threading
import weakref
from typing import Any, cast

import pytest

from fastload_common.errors import ObjectMissingError, SourceError, SourceUnavailableError
from fastload_common.transfer.lanes import Attempt
from fastload_common.transfer.receiver_tasks import Background, Task
from tests.common.transfer.lanes_bench import until


class Call:
    """What a call holds: such as an attempt, and with it staging memory."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def __call__(self) -> None:
        self.done.set()


def test_a_call_that_is_over_is_not_held_by_the_thread_that_waits_for_the_next() -> None:
    background = Background("storm", 1)
    call = Call()
    gone = weakref.ref(call)
    background.submit(call)
    call.done.wait()
    del call
    until(lambda: gone() is None, "the call to go")
    background.close()


@pytest.mark.parametrize(
    ("error", "received_bytes", "counts"),
    [
        (SourceUnavailableError("ended"), 0, True),
        (SourceUnavailableError("ended"), 1, False),
        (ObjectMissingError("gone"), 0, False),
        (KeyError("ours"), 0, False),
    ],
)
def test_an_attempt_that_we_ended_counts_against_who_sent_nothing(
    error: Exception, received_bytes: int, counts: bool
) -> None:
    class Signed:
        def failed(self, error: SourceError, tried: set[str]) -> bool:
            told.append(error)
            return False

    told: list[SourceError] = []
    if isinstance(error, SourceError):
        error.received_bytes = received_bytes
    attempt = cast("Attempt", None)
    task = Task(attempt, reads=cast("Any", None), signed=cast("Any", Signed()))
    task.blame(error)
    assert told == [error] * counts
