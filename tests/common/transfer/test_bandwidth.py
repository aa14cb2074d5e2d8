"""The cap on bytes asked for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.transfer.bandwidth import TokenBucket, capped_part_bytes
from fastload_common.units import KIB, MIB


def test_a_burst_then_the_rate() -> None:
    bucket = TokenBucket(100.0, 50, now_s=10.0)
    assert bucket.delay_s(10.0, 50) == 0
    bucket.take(10.0, 50)
    assert bucket.delay_s(10.0, 20) == pytest.approx(0.2)
    assert bucket.delay_s(10.1, 20) == pytest.approx(0.1)
    assert bucket.delay_s(10.2, 20) == 0
    bucket.take(10.2, 20)
    assert bucket.delay_s(10.2, 1) == pytest.approx(0.01)


def test_what_is_not_used_is_saved_only_up_to_the_burst() -> None:
    bucket = TokenBucket(100.0, 50, now_s=0.0)
    bucket.take(0.0, 50)
    bucket.take(1000.0, 50)
    assert bucket.delay_s(1000.0, 50) == pytest.approx(0.5)


def test_a_request_larger_than_the_burst_waits_until_so_much_is_saved() -> None:
    bucket = TokenBucket(100.0, 50, now_s=0.0)
    assert bucket.delay_s(0.0, 200) == pytest.approx(1.5)
    assert bucket.delay_s(1.5, 200) == 0
    bucket.take(1.5, 200)
    assert bucket.delay_s(1.5, 50) == pytest.approx(0.5)


def test_who_does_not_wait_makes_the_others_wait() -> None:
    bucket = TokenBucket(100.0, 0, now_s=0.0)
    bucket.take(0.0, 300)
    assert bucket.delay_s(0.0, 100) == pytest.approx(4.0)


def test_bytes_of_a_request_that_ended_early_can_be_given_back() -> None:
    bucket = TokenBucket(100.0, 100, now_s=0.0)
    bucket.take(0.0, 100)
    bucket.give_back(60)
    assert bucket.delay_s(0.0, 100) == pytest.approx(0.4)
    bucket.give_back(1000)
    assert bucket.delay_s(0.0, 101) == pytest.approx(0.01)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(100.0, 50, now_s=5.0)
    bucket.take(5.0, 50)
    assert bucket.delay_s(4.0, 10) == pytest.approx(0.1)
    bucket.take(4.0, 0)
    assert bucket.delay_s(5.0, 10) == pytest.approx(0.1)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, -1)])
def test_a_bucket_that_never_fills_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="a bucket of"):
        TokenBucket(rate, burst, 0.0)


@pytest.mark.parametrize(
    ("rate", "part", "expected"),
    [
        (500e6, 8 * MIB, 8 * MIB),
        (MIB, 8 * MIB, 256 * KIB),
        (10 * MIB, 8 * MIB, 40 * 64 * KIB),
        (1000.0, 8 * MIB, 64 * KIB),
        (1000.0, 3000, 3000),
    ],
)
def test_parts_under_a_cap_take_a_quarter_second(rate: float, part: int, expected: int) -> None:
    assert capped_part_bytes(rate, part) == expected


@given(
    st.floats(1, 1e9),
    st.integers(0, 10**7),
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 10**7)), min_size=1, max_size=40),
)
def test_no_span_of_time_sees_more_than_rate_and_burst(
    rate: float, burst: int, asked: list[tuple[float, int]]
) -> None:
    bucket = TokenBucket(rate, burst, now_s=0.0)
    now_s = 0.0
    begun: list[tuple[float, int]] = []
    for gap_s, size_bytes in asked:
        now_s += gap_s
        now_s += bucket.delay_s(now_s, size_bytes)
        assert bucket.delay_s(now_s, size_bytes) * rate < 2
        bucket.take(now_s, size_bytes)
        begun.append((now_s, size_bytes))
    largest = max(burst, *(size_bytes for _, size_bytes in begun))
    for first, last in itertools.combinations_with_replacement(range(len(begun)), 2):
        span_s = begun[last][0] - begun[first][0]
        taken = sum(size_bytes for _, size_bytes in begun[first : last + 1])
        # Each may begin up to a byte early, and floats round.
        assert taken <= rate * span_s + largest + 2 * len(begun) + 1e-6 * taken


def test_a_load_takes_as_long_as_the_cap_says() -> None:
    bucket = TokenBucket(10e6, 10**6, now_s=0.0)
    now_s = 0.0
    for _ in range(100):
        now_s += bucket.delay_s(now_s, 10**6)
        bucket.take(now_s, 10**6)
    assert now_s == pytest.approx(9.9)
