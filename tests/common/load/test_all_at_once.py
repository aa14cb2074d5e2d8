"""Many calls at once: order, limits, and no lost error."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    CheckpointError,
    FastloadError,
    HeaderInvalidError,
    ShardTruncatedError,
    SourceUnavailableError,
)
from fastload_common.load.all_at_once import all_at_once, one_error


def test_results_keep_the_order_and_run_together() -> None:
    together = threading.Barrier(4, timeout=30)

    def double(item: int) -> int:
        together.wait()
        return 2 * item

    assert all_at_once(double, [3, 1, 2, 0], threads=4) == [6, 2, 4, 0]


def test_nothing_to_do() -> None:
    assert all_at_once(lambda item: item, [], threads=4) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_every_damaged_file_is_named_in_one_error(threads: int) -> None:
    def check(item: int) -> None:
        if item % 2:
            raise ShardTruncatedError(f"shard {item} is short", hint="copy it again")

    with pytest.raises(ShardTruncatedError) as caught:
        all_at_once(check, range(6), threads=threads)
    for item in (1, 3, 5):
        assert f"shard {item} is short" in str(caught.value)
    assert str(caught.value).count("copy it again") == 1
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    # Engines send errors between processes this way.
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_after_a_fault_of_the_store_no_more_is_begun() -> None:
    begun: list[int] = []

    def read(item: int) -> None:
        begun.append(item)
        raise SourceUnavailableError("no answer")

    with pytest.raises(SourceUnavailableError, match=r"^no answer$"):
        all_at_once(read, range(100), threads=1)
    assert begun == [0]


def test_fault_of_the_program_comes_through_as_it_is() -> None:
    def check(item: int) -> None:
        if item == 0:
            raise CheckpointError("bad file")
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        all_at_once(check, [0, 1], threads=1)


INTERRUPTED = """
import signal, sys, threading
from fastload_common.load.all_at_once import all_at_once

def leave(*_):
    raise SystemExit(7)

number = getattr(signal, sys.argv[1])
if number == signal.SIGTERM:
    signal.signal(number, leave)
main = threading.main_thread().ident
together = threading.Barrier(4)

def stalled_read(item):
    if together.wait() == 0:
        signal.pthread_kill(main, number)
    threading.Event().wait()

all_at_once(stalled_read, range(8), threads=4)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", -signal.SIGINT), ("SIGTERM", 7)])
def test_an_interrupt_does_not_wait_for_reads_that_are_blocked(name: str, code: int) -> None:
    """Neither the call nor the interpreter's end does; a store may be silent for minutes."""
    command = [sys.executable, "-c", INTERRUPTED, name]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == code, ended.stderr


def test_a_thread_that_is_asked_to_end_is_no_hang() -> None:
    def leave(item: int) -> None:
        raise SystemExit(item)

    with pytest.raises(SystemExit):
        all_at_once(leave, [1, 2], threads=2)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([HeaderInvalidError("a")], HeaderInvalidError),
        ([HeaderInvalidError("a"), ShardTruncatedError("b")], CheckpointError),
        ([HeaderInvalidError("a"), AccessDeniedError("b")], FastloadError),
    ],
)
def test_class_of_the_one_error(errors: list[Exception], kind: type[Exception]) -> None:
    assert type(one_error(errors)) is kind


def test_message_of_a_thousand_errors_is_bounded() -> None:
    error = one_error([HeaderInvalidError(f"file {i} is bad") for i in range(1000)])
    assert "1000 objects failed" in str(error)
    assert "and 980 more" in str(error)
