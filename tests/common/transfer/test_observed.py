"""What a load has seen of its requests: windows and percentiles."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.transfer.observed import MIN_SAMPLES, Observed
from fastload_common.units import MIB


def add(observed: Observed, first_byte_s: float, body_s: float, size_bytes: int = MIB) -> None:
    observed.add(
        first_byte_s=first_byte_s,
        total_s=first_byte_s + body_s,
        size_bytes=size_bytes,
        new_connection=False,
    )


def test_nothing_is_said_before_there_are_enough_samples() -> None:
    observed = Observed()
    for _ in range(MIN_SAMPLES - 1):
        add(observed, 0.03, 0.1)
    assert observed.count == MIN_SAMPLES - 1
    assert observed.first_byte_s(50) is None
    assert observed.body_s_per_byte(50) is None
    assert observed.expected_s(MIB) is None
    assert observed.bytes_per_s_of_connection is None
    add(observed, 0.03, 0.1)
    assert observed.first_byte_s(50) == 0.03
    assert observed.expected_s(2 * MIB) == pytest.approx(0.03 + 0.2)
    assert observed.bytes_per_s_of_connection == pytest.approx(10 * MIB)


def test_the_slow_tenth_and_the_dead_do_not_shift_the_median() -> None:
    observed = Observed()
    draw = random.Random(3)
    for _ in range(256):
        slow = 3 if draw.random() < 0.1 else 1
        add(observed, 0.03 * slow, 0.1 * slow)
    assert observed.first_byte_s(50) == 0.03
    assert observed.expected_s(MIB) == pytest.approx(0.13)
    assert observed.first_byte_s(95) == pytest.approx(0.09)


def test_only_the_newest_count() -> None:
    observed = Observed(window=16)
    for _ in range(100):
        add(observed, 5.0, 5.0)
    for _ in range(16):
        add(observed, 0.01, 0.02)
    assert observed.count == 16
    assert observed.first_byte_s(100) == 0.01
    assert observed.body_s_per_byte(100) == pytest.approx(0.02 / MIB)


def test_an_instant_body_is_an_infinite_rate_and_no_error() -> None:
    observed = Observed()
    for _ in range(MIN_SAMPLES):
        add(observed, 0.03, 0.0)
    assert observed.bytes_per_s_of_connection == math.inf
    assert observed.expected_s(MIB) == 0.03


@pytest.mark.parametrize(
    ("first_byte_s", "total_s", "size_bytes"),
    [(0.1, 0.2, 0), (math.nan, 0.2, 1), (0.1, math.inf, 1), (0.1, 0.2, -1)],
)
def test_what_cannot_be_a_sample_is_left_out(
    first_byte_s: float, total_s: float, size_bytes: int
) -> None:
    observed = Observed()
    observed.add(
        first_byte_s=first_byte_s, total_s=total_s, size_bytes=size_bytes, new_connection=True
    )
    assert observed.count == 0


def test_a_clock_that_disagrees_makes_no_negative_times() -> None:
    observed = Observed()
    for _ in range(MIN_SAMPLES):
        observed.add(first_byte_s=-0.1, total_s=-0.2, size_bytes=1, new_connection=False)
    assert observed.first_byte_s(50) == 0
    assert observed.body_s_per_byte(50) == 0


def test_a_window_too_small_for_a_percentile_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 7 requests"):
        Observed(window=MIN_SAMPLES - 1)


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.integers(1, 1000)), max_size=60),
    st.integers(MIN_SAMPLES, 20),
    st.floats(0, 100),
)
def test_percentiles_are_those_of_the_window(
    samples: list[tuple[float, float, int]], window: int, percent: float
) -> None:
    observed = Observed(window)
    for first_byte_s, body_s, size_bytes in samples:
        add(observed, first_byte_s, body_s, size_bytes)
    kept = samples[-window:]
    assert observed.count == len(kept)
    if len(kept) < MIN_SAMPLES:
        assert observed.first_byte_s(percent) is None
        return
    rank = max(1, math.ceil(len(kept) * percent / 100))
    assert observed.first_byte_s(percent) == sorted(row[0] for row in kept)[rank - 1]
    bodies = sorted(max(row[0] + row[1] - row[0], 0.0) / row[2] for row in kept)
    assert observed.body_s_per_byte(percent) == bodies[rank - 1]
