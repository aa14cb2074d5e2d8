"""How many receivers there are, and what each may do at once."""

from __future__ import annotations

from fastload_common.transfer import receiver_process


def test_how_many_there_are() -> None:
    count = receiver_process.process_count
    assert [count(n, 2) for n in (1, 4, 5, 8, 32, 33, 64, 1000)] == [1, 1, 2, 2, 2, 3, 4, 4]
    assert [count(n, 16) for n in (4, 32, 256, 4096)] == [1, 2, 16, 32]
    assert receiver_process.shares(7, 3) == [3, 2, 2]
    assert receiver_process.shares(1, 2) == [1, 0]
