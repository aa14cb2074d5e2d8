"""A store that says "slow down": exact timelines, and how often it is asked."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from fastload_common.transfer.throttle import Throttle


def served(throttle: Throttle, now_s: float, count: int = 16) -> None:
    for _ in range(count):
        throttle.succeeded(now_s)


def test_a_refusal_halves_at_most_once_a_second() -> None:
    throttle = Throttle(32)
    limits = []
    for at_s in (0.0, 0.1, 0.9, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0):
        throttle.throttled(at_s)
        limits.append(throttle.limit)
    assert limits == [16, 16, 16, 8, 8, 4, 2, 1, 1, 1]


def test_success_raises_by_an_eighth_of_the_maximum_a_second() -> None:
    throttle = Throttle(32)
    throttle.throttled(0.0)
    limits = []
    for eighth in range(1, 49):
        throttle.succeeded(eighth / 8)
        if eighth % 8 == 0:
            limits.append(throttle.limit)
    assert limits == [20, 24, 28, 32, 32, 32]


def test_a_success_after_a_long_silence_does_not_leap() -> None:
    throttle = Throttle(32)
    throttle.throttled(0.0)
    throttle.succeeded(1000.0)
    assert throttle.limit == 20


def test_one_refusal_in_a_hundred_costs_little() -> None:
    throttle = Throttle(32)
    served(throttle, 0.0)
    limits = []
    for number in range(1, 2000):
        now_s = number / 60
        if number % 100 == 0:
            throttle.throttled(now_s)
        else:
            throttle.succeeded(now_s)
        limits.append(throttle.limit)
        assert throttle.delay_s(now_s) == 0
    assert min(limits) >= 27


def test_nothing_is_asked_for_a_while_that_doubles_when_all_is_refused() -> None:
    throttle = Throttle(64)
    now_s, pauses_s = 0.0, []
    for _ in range(6):
        for _ in range(4):
            throttle.throttled(now_s)
        pauses_s.append(throttle.delay_s(now_s))
        now_s += pauses_s[-1]
        assert throttle.delay_s(now_s) == 0
    assert pauses_s == [1, 2, 4, 8, 8, 8]
    throttle.succeeded(now_s)
    for _ in range(8):
        throttle.throttled(now_s)
    assert throttle.delay_s(now_s) == 1


def test_replies_during_a_pause_do_not_prolong_it() -> None:
    throttle = Throttle(64)
    for hundredth in range(60):
        throttle.throttled(hundredth / 100)
    assert throttle.delay_s(0.6) == pytest.approx(0.43)


def test_a_few_refusals_at_the_start_or_among_successes_are_no_reason_to_pause() -> None:
    throttle = Throttle(64)
    for _ in range(3):
        throttle.throttled(0.0, retry_after_s=5.0)
    assert throttle.delay_s(0.0) == 0
    served(throttle, 1.0)
    for _ in range(10):
        throttle.throttled(1.0, retry_after_s=5.0)
    assert throttle.delay_s(1.0) == 0


@pytest.mark.parametrize(("asked_s", "expected_s"), [(3.0, 3.0), (0.0, 1.0), (-1, 1.0), (1e9, 60)])
def test_retry_after_is_heeded_when_all_is_refused(asked_s: float, expected_s: float) -> None:
    throttle = Throttle(64)
    for _ in range(4):
        throttle.throttled(0.0, retry_after_s=asked_s)
    assert throttle.delay_s(0.0) == expected_s


def test_the_maximum_may_change() -> None:
    throttle = Throttle(32)
    throttle.set_maximum(64)
    assert throttle.limit == 64
    throttle.throttled(0.0)
    assert throttle.limit == 32
    throttle.set_maximum(128)
    assert throttle.limit == 32
    throttle.set_maximum(8)
    assert throttle.limit == 8
    throttle.set_maximum(0)
    assert throttle.limit == 1
    assert Throttle(0).limit == 1


def test_it_shows_its_state() -> None:
    throttle = Throttle(32)
    throttle.throttled(0.0)
    assert repr(throttle) == "Throttle(16 of 32, 100% refused)"


class Store:
    """Answers after 30 ms; connections never run out of work, as in the middle of a load."""

    def __init__(self, refuses: Callable[[float], bool], connections: int) -> None:
        self.throttle = Throttle(connections)
        self.asked_s: list[float] = []
        self.served_s: list[float] = []
        self._refuses = refuses
        self._replies: list[float] = []
        self._now_s = 0.0

    def run(self, until_s: float) -> None:
        while self._now_s < until_s:
            delay_s = self.throttle.delay_s(self._now_s)
            while not delay_s and len(self._replies) < self.throttle.limit:
                heapq.heappush(self._replies, self._now_s + 0.03)
                self.asked_s.append(self._now_s)
            if delay_s and (not self._replies or self._now_s + delay_s < self._replies[0]):
                self._now_s += delay_s
                continue
            self._now_s = heapq.heappop(self._replies)
            if self._refuses(self._now_s):
                self.throttle.throttled(self._now_s)
            else:
                self.throttle.succeeded(self._now_s)
                self.served_s.append(self._now_s)

    def most_in_a_second(self, since_s: float) -> int:
        asked_s = [at_s for at_s in self.asked_s if at_s >= since_s]
        return max((sum(1 for b in asked_s if a <= b < a + 1) for a in asked_s), default=0)


@pytest.mark.parametrize("connections", [32, 64, 256])
def test_s15_a_store_that_refuses_everything_gets_few_requests(connections: int) -> None:
    store = Store(lambda now_s: True, connections)
    store.run(20.0)
    assert len(store.asked_s) < 2 * connections
    assert store.most_in_a_second(1.0) <= connections / 2
    assert store.throttle.limit <= max(1, connections / 16)


def test_s15_refusals_that_begin_in_a_load_are_noticed_within_one_round_of_requests() -> None:
    store = Store(lambda now_s: now_s > 5.0, 64)
    store.run(25.0)
    assert sum(1 for at_s in store.asked_s if at_s > 5.0) < 4 * 64


def test_s15_a_third_refused_for_twenty_seconds_lowers_the_concurrency_which_recovers() -> None:
    draw = random.Random(5)
    store = Store(lambda now_s: now_s < 20.0 and draw.random() < 0.3, 64)
    store.run(20.0)
    assert store.throttle.limit <= 64 / 4
    assert store.most_in_a_second(5.0) <= 64 / 4 / 0.03
    assert sum(1 for at_s in store.served_s if at_s > 5) > 15 * 50
    low = store.throttle.limit
    store.run(30.0)
    assert store.throttle.limit == 64 > low
