"""Back-off arithmetic."""

from __future__ import annotations

import random

import pytest

from fastload_common.transfer.policy import TransferPolicy

POLICY = TransferPolicy(7, 10, 5.0, 20.0, deadline_s=60)
ALMOST_ONE = 1 - 2**-53


@pytest.mark.parametrize(
    ("attempt", "bound_s"),
    [(0, 0.25), (1, 0.25), (2, 0.5), (3, 1.0), (7, 16.0), (8, 20.0), (10_000, 20.0)],
)
def test_the_bound_doubles_up_to_the_cap(attempt: int, bound_s: float) -> None:
    assert POLICY.backoff_delay_s(attempt, lambda: ALMOST_ONE) == pytest.approx(bound_s)
    assert POLICY.backoff_delay_s(attempt, lambda: 0.5) == bound_s / 2
    assert POLICY.backoff_delay_s(attempt, lambda: 0.0) == 0


@pytest.mark.parametrize(
    ("retry_after_s", "least_s"), [(2.0, 2.0), (0.0, 0.0), (-5.0, 0.0), (1e9, 60.0)]
)
def test_retry_after_is_a_lower_bound(retry_after_s: float, least_s: float) -> None:
    assert POLICY.backoff_delay_s(3, lambda: 0.5, retry_after_s) == least_s + 0.5


def test_jitter_spreads_a_crowd() -> None:
    draw = random.Random(1).random
    delays_s = sorted(POLICY.backoff_delay_s(4, draw) for _ in range(1000))
    assert delays_s[100] < 0.3
    assert delays_s[900] > 1.7
