"""The fake clock itself: a wrong one would make other tests pass for nothing."""

from __future__ import annotations

import threading

import pytest

from fastload_common.testing.fake_clock import FakeClock


def test_time_moves_only_when_told() -> None:
    clock = FakeClock(start_s=5)
    assert clock.monotonic_s() == clock.monotonic_s() == 5
    clock.advance(2.5)
    assert clock.monotonic_s() == clock.process_cpu_s() == 7.5


def test_auto_waits_move_the_clock_to_their_end() -> None:
    clock = FakeClock(auto=True, start_s=0)
    assert clock.wait(threading.Event(), 3) is False
    assert clock.monotonic_s() == 3
    ready = threading.Event()
    ready.set()
    assert clock.wait(ready, 3) is True
    assert clock.monotonic_s() == 3
    assert clock.waits_s == [3, 3]


@pytest.mark.parametrize("how", ["event", "time"])
def test_a_manual_wait_ends_by_its_event_or_by_time(how: str) -> None:
    clock = FakeClock()
    event = threading.Event()
    result: list[bool] = []
    thread = threading.Thread(target=lambda: result.append(clock.wait(event, 10)))
    thread.start()
    clock.wait_for_waiters(1)
    clock.advance(9.9)
    assert result == []
    if how == "event":
        event.set()
    else:
        clock.advance(0.2)
    thread.join(10)
    assert result == [how == "event"]


def test_waiting_for_waiters_ends() -> None:
    with pytest.raises(TimeoutError, match="0 of 1"):
        FakeClock().wait_for_waiters(1, real_timeout_s=0.05)
