"""A node's budgets, divided among its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.transfer.node_share import share_of


@pytest.mark.parametrize(
    ("total", "ranks", "shares"),
    [
        (256, 8, [32] * 8),
        (10, 4, [3, 3, 2, 2]),
        (7, 1, [7]),
        (3, 3, [1, 1, 1]),
        (2, 4, [1, 1, 1, 1]),
        (1_000_000_007, 3, [333_333_336, 333_333_336, 333_333_335]),
    ],
)
def test_the_remainder_goes_to_the_lower_ranks(total: int, ranks: int, shares: list[int]) -> None:
    assert [share_of(total, rank, ranks) for rank in range(ranks)] == shares


@given(st.integers(1, 10**15), st.integers(1, 64))
def test_shares_add_up_exactly_and_nobody_gets_nothing(total: int, ranks: int) -> None:
    shares = [share_of(total, rank, ranks) for rank in range(ranks)]
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    if total >= ranks:
        assert sum(shares) == total
    else:
        assert shares == [1] * ranks


@pytest.mark.parametrize(("total", "rank", "ranks"), [(0, 0, 1), (5, 2, 2), (5, -1, 2), (5, 0, 0)])
def test_what_makes_no_sense_is_refused(total: int, rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="wants a share"):
        share_of(total, rank, ranks)
