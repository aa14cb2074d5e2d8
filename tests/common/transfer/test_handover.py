"""The interpreter's switch interval: short while chunks are fetched, and then as it was."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from fastload_common.transfer.handover import SWITCH_INTERVAL_S, quick_handover

PYTHONS_OWN_S = 0.005


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(PYTHONS_OWN_S)
    yield
    sys.setswitchinterval(before_s)


def now_s() -> float:
    return round(sys.getswitchinterval(), 6)


def test_it_is_short_inside_and_as_before_after_the_last_one() -> None:
    with quick_handover():
        assert now_s() == SWITCH_INTERVAL_S
        with quick_handover():
            assert now_s() == SWITCH_INTERVAL_S
        assert now_s() == SWITCH_INTERVAL_S
    assert now_s() == PYTHONS_OWN_S


def test_an_error_inside_ends_it_too() -> None:
    with pytest.raises(ValueError, match="inside"), quick_handover():
        raise ValueError("inside")
    assert now_s() == PYTHONS_OWN_S


def test_threads_that_end_in_any_order() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with quick_handover():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=other)
    with quick_handover():
        thread.start()
        assert inside.wait(30)
    assert now_s() == SWITCH_INTERVAL_S
    leave.set()
    thread.join()
    assert now_s() == PYTHONS_OWN_S


@pytest.mark.parametrize("theirs_s", [0.0001, 0.002])
def test_what_somebody_sets_meanwhile_stays(theirs_s: float) -> None:
    with quick_handover():
        sys.setswitchinterval(theirs_s)
    assert now_s() == theirs_s


def test_a_shorter_one_stays() -> None:
    sys.setswitchinterval(0.0001)
    with quick_handover():
        assert now_s() == 0.0001
    assert now_s() == 0.0001


def test_a_process_forked_meanwhile_begins_anew() -> None:
    with quick_handover():
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            seen = [now_s()]
            with quick_handover():
                seen.append(now_s())
            seen.append(now_s())
            os.write(writing, repr(seen).encode())
            os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        assert os.read(reading, 100).decode() == repr(
            [PYTHONS_OWN_S, SWITCH_INTERVAL_S, PYTHONS_OWN_S]
        )
        os.close(reading)
        assert now_s() == SWITCH_INTERVAL_S
    assert now_s() == PYTHONS_OWN_S


def test_a_fetch_that_nobody_ends_gives_it_back_when_it_is_collected() -> None:
    def fetch() -> Iterator[int]:
        with quick_handover():
            yield 1

    filled = fetch()
    next(filled)
    assert now_s() == SWITCH_INTERVAL_S
    del filled
    gc.collect()
    assert now_s() == PYTHONS_OWN_S
