"""What a gap may cost: the formula at known points, its bounds, and what few reads say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.plan.cost import (
    LEAST_GAP_BYTES,
    MOST_GAP_BYTES,
    PathCost,
    merge_gap_bytes,
    observe,
)
from fastload_common.units import GIB, KIB, MIB

# The CPU of a request receives so many bytes: 0.2 ms at 1.2 s for each GiB.
CPU_BYTES = 0.0002 * GIB / 1.2


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "expected_bytes"),
    [
        (0.03, 90e6, 337_500 + CPU_BYTES),
        (0.1, 90e6, 1_125_000 + CPU_BYTES),
        (0.0, 90e6, CPU_BYTES),
        (0.0001, 2e9, 25_000 + CPU_BYTES),
        (1.0, 90e6, MOST_GAP_BYTES),
        (math.inf, 90e6, MOST_GAP_BYTES),
        (0.0, math.inf, MOST_GAP_BYTES),
    ],
)
def test_a_gap_costs_what_a_request_costs(
    latency_s: float, bytes_per_s: float, expected_bytes: float
) -> None:
    assert merge_gap_bytes(latency_s, bytes_per_s) == math.ceil(expected_bytes)


def test_without_a_connection_to_spare_a_wait_costs_all_that_it_would_have_brought() -> None:
    gap_bytes = merge_gap_bytes(0.01, 100e6, connections_per_stream=1, request_cpu_s=0.0)
    assert gap_bytes == 1_000_000
    assert merge_gap_bytes(0.01, 100e6, connections_per_stream=4, request_cpu_s=0.0) == 250_000


def test_a_request_that_costs_nothing_still_merges_short_gaps() -> None:
    assert merge_gap_bytes(0.0, 0.0, request_cpu_s=0.0) == LEAST_GAP_BYTES


@given(st.floats(0, 10), st.floats(0, 1e10), st.floats(1, 64))
def test_a_gap_is_within_bounds_and_grows_with_the_latency(
    latency_s: float, bytes_per_s: float, connections: float
) -> None:
    gap_bytes = merge_gap_bytes(latency_s, bytes_per_s, connections_per_stream=connections)
    assert LEAST_GAP_BYTES <= gap_bytes <= MOST_GAP_BYTES
    longer = merge_gap_bytes(2 * latency_s, bytes_per_s, connections_per_stream=connections)
    assert longer >= gap_bytes


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "connections"),
    [(-1, 1, 1), (1, -1, 1), (math.nan, 1, 1), (1, math.nan, 1), (1, 1, 0.5), (1, 1, math.nan)],
)
def test_numbers_that_make_no_sense(
    latency_s: float, bytes_per_s: float, connections: float
) -> None:
    with pytest.raises(ValueError, match=r"at least 1|not negative"):
        merge_gap_bytes(latency_s, bytes_per_s, connections_per_stream=connections)


def test_too_few_reads_say_nothing() -> None:
    assert observe([]) == observe([(64 * KIB, 0.5), (64 * KIB, 0.5)]) == PathCost()


def test_the_latency_is_that_of_open_connections() -> None:
    opened, open_before = (64 * KIB, 0.09), (64 * KIB, 0.03)
    cost = observe([opened, opened, open_before, opened, open_before, open_before, opened, opened])
    assert cost == PathCost(latency_s=0.03, latency_reads=8)


def test_only_large_reads_say_something_of_the_rate() -> None:
    small, large = [(64 * KIB, 0.02)] * 4, (4 * MIB, 0.02 + 4 * MIB / 50e6)
    assert observe([*small, large, large]).rate_reads == 0
    cost = observe([*small, large, (4 * MIB, 1.0), large, large])
    assert cost.bytes_per_s == pytest.approx(50e6)
    assert (cost.latency_s, cost.latency_reads, cost.rate_reads) == (0.02, 4, 4)


def test_reads_that_took_no_time_are_no_reason_to_divide_by_it() -> None:
    cost = observe([(0, 0.0), *[(64 * KIB, 0.0)] * 3, *[(2 * MIB, 0.0)] * 3])
    assert (cost.latency_s, cost.rate_reads) == (0.0, 0)
    assert cost.gap_bytes == math.ceil(CPU_BYTES)


def test_the_gap_of_a_path() -> None:
    assert PathCost().gap_bytes == merge_gap_bytes(0.03, 90e6)
