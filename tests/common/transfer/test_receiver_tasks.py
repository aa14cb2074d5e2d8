"""Threads for calls that may block."""

from __future__ import annotations

import threading
import weakref

from fastload_common.transfer.receiver_tasks import Background
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
