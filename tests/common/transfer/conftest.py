"""Makes fetchers for tests, and checks that none of them leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.common.transfer.transfer_bench import Bench, MakeFetcher, receiving_threads


@pytest.fixture
def make() -> Iterator[MakeFetcher]:
    """Makes benches; afterwards no slot, connection or thread may be left."""
    made: list[Bench] = []

    def make_one(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make_one
    for bench in made:
        bench.fetcher.close()
        assert bench.arena.leased_count == 0
        assert bench.source.receivers_open == 0
        bench.arena.close()
    assert receiving_threads() == []
