"""Slow requests: verdicts at exact times, rates, the crowd, the budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.transfer.hedging import (
    Crowd,
    Flight,
    HedgeBudget,
    RateMeter,
    SlowPolicy,
    Verdict,
)
from fastload_common.transfer.observed import Observed
from fastload_common.units import KIB, MIB

POLICY = SlowPolicy()
WAITING = Flight(
    started_s=0.0,
    size_bytes=8 * MIB,
    received_bytes=0,
    first_byte_s=None,
    last_progress_s=0.0,
    rate_bytes_per_s=None,
    hedged=False,
)
FLOWING = replace(
    WAITING,
    received_bytes=4 * MIB,
    first_byte_s=0.05,
    last_progress_s=1.0,
    rate_bytes_per_s=50.0 * MIB,
)


def seen(first_byte_s: float, bytes_per_s: float, count: int = 100) -> Observed:
    """What a load has seen whose requests were all alike."""
    observed = Observed()
    for _ in range(count):
        observed.add(
            first_byte_s=first_byte_s,
            total_s=first_byte_s + 8 * MIB / bytes_per_s,
            size_bytes=8 * MIB,
            new_connection=False,
        )
    return observed


USUAL = seen(0.05, 50 * MIB)


def timeline(
    flight: Flight,
    observed: Observed,
    *,
    idle: bool = False,
    crowd: Crowd | None = None,
    until_s: float = 30.0,
) -> list[tuple[float, str]]:
    """When the verdict on a flight that stays as it is becomes another, to the hundredth."""
    changes: list[tuple[float, str]] = []
    last = "wait"
    for hundredth in range(int(flight.last_progress_s * 100), int(until_s * 100) + 1):
        now_s = hundredth / 100
        verdict = POLICY.judge(now_s, flight, observed, idle=idle, crowd=crowd).value
        if verdict != last:
            changes.append((now_s, verdict))
        last = verdict
    return changes


def crowd_of(now_s: float, flights: Iterable[Flight]) -> Crowd:
    crowd = Crowd()
    crowd.look(now_s, flights)
    return crowd


# Silence


def test_before_anything_is_known_a_head_may_take_a_second_and_a_half() -> None:
    assert timeline(WAITING, Observed()) == [(1.5, "hedge"), (3.0, "kill")]


@pytest.mark.parametrize(
    ("first_byte_s", "hedge_s", "kill_s"),
    [(0.01, 0.25, 2.0), (0.05, 0.25, 2.0), (0.25, 0.75, 2.0), (0.5, 1.5, 3.0), (1.0, 3.0, 6.0)],
)
def test_a_late_head_is_judged_by_what_was_seen(
    first_byte_s: float, hedge_s: float, kill_s: float
) -> None:
    observed = seen(first_byte_s, 50 * MIB)
    assert timeline(WAITING, observed) == [(hedge_s, "hedge"), (kill_s, "kill")]


def test_a_silence_in_the_body_counts_from_the_last_byte() -> None:
    assert timeline(FLOWING, USUAL) == [(1.25, "hedge"), (3.0, "kill")]


def test_at_the_end_of_a_load_one_waits_less() -> None:
    assert timeline(WAITING, USUAL, idle=True)[0] == (0.2, "hedge")
    assert timeline(WAITING, seen(0.5, 50 * MIB), idle=True)[0] == (1.0, "hedge")


def test_of_two_racers_the_silent_one_is_ended_soon() -> None:
    assert timeline(replace(WAITING, hedged=True), USUAL) == [(0.5, "kill")]
    assert timeline(replace(WAITING, hedged=True), USUAL, idle=True) == [(0.4, "kill")]


def test_what_was_ended_before_gets_twice_the_time_up_to_the_read_timeout() -> None:
    """An object that needs seconds for its first byte must come at last."""
    found = [
        timeline(replace(WAITING, hedged=True, kills=kills), USUAL)[0][0] for kills in range(8)
    ]
    assert found == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert timeline(replace(WAITING, kills=10**6), USUAL)[-1] == (20.0, "kill")


def test_on_a_slow_load_a_slice_may_take_its_time() -> None:
    # 256 KiB at 64 KiB/s are four seconds.
    flight = replace(FLOWING, rate_bytes_per_s=64.0 * KIB)
    found = timeline(flight, seen(0.05, 64 * KIB))
    assert found == [(11.0, "kill")]


@pytest.mark.parametrize("read_timeout_s", [0.001, 1.0, 5.0, 20.0, 600.0])
def test_nothing_waits_longer_than_the_read_timeout(read_timeout_s: float) -> None:
    policy = SlowPolicy.within(read_timeout_s)
    for flight in (WAITING, replace(WAITING, kills=50), replace(FLOWING, last_progress_s=0.0)):
        for observed in (Observed(), USUAL, seen(100.0, 1000.0)):
            verdict = policy.judge(read_timeout_s, flight, observed, idle=False)
            assert verdict is Verdict.KILL
    policy_s = (policy.unknown_late_s, policy.least_kill_s, policy.most_kill_s, policy.probe_s)
    assert max(policy_s) <= read_timeout_s


# Rates


@pytest.mark.parametrize(
    ("rate_mib", "age_s", "idle", "expected"),
    [
        (50.0, 5.0, False, "wait"),
        (17.0, 5.0, False, "wait"),  # three times slower than the others, but others wait
        (2.0, 5.0, False, "hedge"),  # 2 s against 0.13 s
        (2.0, 2.9, False, "wait"),  # a rate of less than three seconds
        (50.0, 1.0, True, "wait"),
        (20.0, 1.0, True, "wait"),  # 0.2 s against 0.13 s: would win next to nothing
        (15.0, 1.0, True, "hedge"),  # 0.27 s against 0.13 s
        (15.0, 0.19, True, "wait"),
    ],
)
def test_a_slow_body_is_hedged_when_a_fresh_one_is_clearly_faster(
    rate_mib: float, age_s: float, idle: bool, expected: str
) -> None:
    now_s = FLOWING.started_s + 0.05 + age_s
    flight = replace(FLOWING, last_progress_s=now_s, rate_bytes_per_s=rate_mib * MIB)
    assert POLICY.judge(now_s, flight, USUAL, idle=idle).value == expected
    hedged = replace(flight, hedged=True)
    assert POLICY.judge(now_s, hedged, USUAL, idle=idle) is Verdict.WAIT


@pytest.mark.parametrize("hedged", [False, True])
@pytest.mark.parametrize(
    ("rate_bytes_per_s", "age_s", "killed"),
    [(63.9 * KIB, 3.1, True), (63.9 * KIB, 2.9, False), (64.1 * KIB, 60.0, False)],
)
def test_s18_a_trickle_is_ended(
    rate_bytes_per_s: float, age_s: float, killed: bool, hedged: bool
) -> None:
    now_s = 0.05 + age_s
    flight = replace(
        FLOWING, last_progress_s=now_s, rate_bytes_per_s=rate_bytes_per_s, hedged=hedged
    )
    found = POLICY.judge(now_s, flight, seen(0.05, 64 * KIB), idle=False)
    assert (found is Verdict.KILL) == killed


# The others


def test_when_all_bodies_are_slow_none_is_judged_by_the_past() -> None:
    now_s = 10.0
    slow = replace(FLOWING, last_progress_s=now_s, rate_bytes_per_s=1.0 * MIB)
    crowd = crowd_of(now_s, [slow] * 8)
    assert POLICY.judge(now_s, slow, USUAL, idle=False) is Verdict.HEDGE
    assert POLICY.judge(now_s, slow, USUAL, idle=False, crowd=crowd) is Verdict.WAIT
    slower = replace(slow, rate_bytes_per_s=0.2 * MIB)
    assert POLICY.judge(now_s, slower, USUAL, idle=False, crowd=crowd) is Verdict.HEDGE


def test_a_slow_link_shared_by_many_is_no_trickle() -> None:
    now_s = 10.0
    slow = replace(FLOWING, last_progress_s=now_s, rate_bytes_per_s=20.0 * KIB)
    others = crowd_of(now_s, [slow] * 8)
    assert POLICY.judge(now_s, slow, USUAL, idle=False, crowd=others) is Verdict.WAIT
    slower = replace(slow, rate_bytes_per_s=4.0 * KIB)
    assert POLICY.judge(now_s, slower, USUAL, idle=False, crowd=others) is Verdict.KILL
    dead = replace(slow, rate_bytes_per_s=1.0)
    all_dead = crowd_of(now_s, [dead] * 8)
    assert POLICY.judge(now_s, dead, USUAL, idle=False, crowd=all_dead) is Verdict.KILL


def test_when_all_fell_silent_together_a_few_try_after_a_while() -> None:
    changes = []
    last = "wait"
    crowd = Crowd()
    for eighth in range(100):
        now_s = FLOWING.last_progress_s + eighth / 8
        crowd.look(now_s, [FLOWING] * 8)
        verdict = POLICY.judge(now_s, FLOWING, USUAL, idle=False, crowd=crowd).value
        if verdict != last:
            changes.append((eighth / 8, verdict))
        last = verdict
    assert changes == [(4.0, "hedge"), (8.0, "kill")]


def test_one_silent_among_many_is_judged_at_once() -> None:
    now_s = 1.3
    moving = replace(FLOWING, last_progress_s=1.29)
    crowd = crowd_of(now_s, [FLOWING] + [moving] * 7)
    assert POLICY.judge(now_s, FLOWING, USUAL, idle=False, crowd=crowd) is Verdict.HEDGE


def test_a_late_head_needs_somebody_who_was_served_since() -> None:
    earlier = replace(FLOWING, started_s=-1.0, last_progress_s=0.3)
    later = replace(FLOWING, started_s=0.1, last_progress_s=0.3)
    waiting = [WAITING] * 4
    nobody = crowd_of(0.3, [earlier] * 4 + waiting)
    assert timeline(WAITING, USUAL, crowd=nobody) == [(1.5, "hedge"), (10.0, "kill")]
    somebody = crowd_of(0.3, [earlier] * 3 + [later] + waiting)
    assert timeline(WAITING, USUAL, crowd=somebody) == [(0.25, "hedge"), (2.0, "kill")]


def test_those_left_at_the_end_are_no_crowd() -> None:
    crowd = Crowd()
    found = []
    for size in (32, 15, 16):
        crowd.look(1.5, [FLOWING] * size)
        verdict = POLICY.judge(1.5, FLOWING, USUAL, idle=True, crowd=crowd)
        found.append((crowd.is_one, verdict.value))
    assert found == [(True, "wait"), (False, "hedge"), (True, "wait")]
    assert not crowd_of(0.0, [FLOWING] * 3).is_one


def test_who_overslept_judges_nobody_before_the_next_look() -> None:
    crowd = Crowd()
    verdicts = []
    for now_s in (1.0, 60.0, 60.05):
        crowd.look(now_s, [WAITING])
        verdicts.append(POLICY.judge(now_s, WAITING, USUAL, idle=False, crowd=crowd).value)
    assert verdicts == ["hedge", "wait", "kill"]


def test_slices_that_come_in_bunches_are_remembered_for_a_moment() -> None:
    crowd = Crowd()
    crowd.look(3.0, [FLOWING] * 8)
    assert crowd.silence_s == 2.0
    crowd.look(4.0, [replace(FLOWING, last_progress_s=4.0)] * 8)
    assert crowd.silence_s == 1.0


# Meter


def test_a_rate_is_of_the_last_seconds_only() -> None:
    meter = RateMeter(window_s=3.0)
    assert meter.rate_bytes_per_s(0.0) is None
    meter.add(0.0, 0)
    assert meter.rate_bytes_per_s(0.0) is None
    meter.add(1.0, 1000)
    assert meter.rate_bytes_per_s(1.0) == 1000
    assert meter.rate_bytes_per_s(2.0) == 500
    for second in range(2, 11):
        meter.add(float(second), 1000 + 10 * (second - 1))
    assert meter.rate_bytes_per_s(10.0) == 10
    assert meter.rate_bytes_per_s(12.0) == pytest.approx(10 / 3)
    assert meter.rate_bytes_per_s(20.0) == 0


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(0, 10**6)), min_size=1, max_size=50))
def test_a_rate_is_never_negative_and_never_above_the_fastest(
    steps: list[tuple[float, int]],
) -> None:
    meter = RateMeter()
    now_s, received_bytes = 0.0, 0
    meter.add(now_s, received_bytes)
    for gap_s, size_bytes in steps:
        now_s += gap_s + 0.01
        received_bytes += size_bytes
        meter.add(now_s, received_bytes)
        rate = meter.rate_bytes_per_s(now_s)
        assert rate is not None
        assert 0 <= rate <= received_bytes / min(now_s, 3.0) * (1 + 1e-9)


# Budget


def test_a_budget_of_a_share_with_a_floor() -> None:
    budget = HedgeBudget(share=0.1, floor_bytes=100, at_once=10)
    assert budget.try_take(60, 0)
    assert not budget.try_take(60, 0)
    assert budget.try_take(40, 0)
    assert not budget.try_take(1, 1000)
    assert budget.try_take(1, 1010)
    budget.settle(60, 0)  # the hedge won, and the other had brought nothing since
    assert budget.try_take(59, 0)
    budget.settle(40, 40)
    assert budget.wasted_bytes == 40
    assert not budget.try_take(1, 0)
    assert budget.try_take(900, 10_000)


def test_a_budget_bounds_how_many_race() -> None:
    budget = HedgeBudget(floor_bytes=100, at_once=2)
    assert budget.try_take(1, 0)
    assert budget.try_take(1, 0)
    assert not budget.try_take(1, 0)
    assert repr(budget) == "HedgeBudget(2 running, 2 bytes exposed, 0 wasted)"
    budget.settle(1, 1)
    assert budget.try_take(1, 0)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1), st.booleans()), max_size=60))
def test_a_budget_is_never_overdrawn(asked: list[tuple[int, float, bool]]) -> None:
    budget = HedgeBudget(share=0.05, floor_bytes=100, at_once=5)
    running: list[tuple[int, float]] = []
    wasted = delivered = 0
    for missing, share_wasted, settle in asked:
        delivered += 100
        if budget.try_take(missing, delivered):
            running.append((missing, share_wasted))
        exposed = sum(size for size, _ in running)
        assert exposed + wasted <= max(100, 0.05 * delivered)
        assert len(running) <= 5
        if settle and running:
            size, share = running.pop(0)
            wasted += int(size * share)
            budget.settle(size, int(size * share))
    assert budget.wasted_bytes == wasted
