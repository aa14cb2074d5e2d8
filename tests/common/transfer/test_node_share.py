"""A node's budgets, divided among its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.transfer.node_share import NodeShare, share_of


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


def test_all_budgets_of_a_rank() -> None:
    budgets = {"connections": 100, "memory_bytes": 1001, "bytes_per_s": 500_000_001}
    shares = [NodeShare.of(rank, 2, **budgets) for rank in range(2)]
    assert shares[0] == NodeShare(50, 501, 250_000_001)
    assert shares[1] == NodeShare(50, 500, 250_000_000)
    uncapped = NodeShare.of(0, 1, connections=1, memory_bytes=1, bytes_per_s=None)
    assert uncapped.bytes_per_s is None
