"""What one rank may take, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import OutOfBudgetError
from fastload_common.load.request import RankPlace
from fastload_common.load.sizes import Machine, choose_sizes
from fastload_common.units import GIB, KIB, MIB

HUGE = Machine(cpu_count=192, descriptor_limit=1 << 20, read_text=lambda path: None)
SMALL = Machine(cpu_count=2, descriptor_limit=1024, read_text=lambda path: None)


def machine(limit_bytes: int, cpu_count: int = 8) -> Machine:
    meminfo = f"MemAvailable: {limit_bytes // 1024} kB\n"
    return Machine(cpu_count, 1 << 20, {"/proc/meminfo": meminfo}.get)


def place(rank: int, ranks: int) -> RankPlace:
    return RankPlace(local_rank=rank, local_world_size=ranks)


def test_a_large_model_gets_large_chunks_and_many_connections() -> None:
    sizes = choose_sizes(Settings(), place(0, 1), 140 * GIB, machine=HUGE)
    assert sizes.chunk_bytes == 16 * MIB
    assert 32 <= sizes.start_concurrency <= sizes.concurrency
    assert sizes.concurrency > 64
    assert sizes.slots >= sizes.concurrency * 0.9


def test_a_small_model_gets_small_chunks_so_that_all_connections_work() -> None:
    sizes = choose_sizes(Settings(), place(0, 1), 86 * MIB, machine=SMALL)
    assert sizes.chunk_bytes == MIB
    assert sizes.concurrency <= 86


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_is_set_counts_for_the_node(ranks: int) -> None:
    settings = Settings(concurrency=65, memory_bytes=2 * GIB + 3, max_bytes_per_s=10**9 + 1)
    each = [
        choose_sizes(settings, place(rank, ranks), 64 * GIB, machine=HUGE) for rank in range(ranks)
    ]
    assert sum(sizes.concurrency for sizes in each) == 65
    assert sum(sizes.memory_bytes for sizes in each) == 2 * GIB + 3
    assert sum(sizes.max_bytes_per_s or 0 for sizes in each) == 10**9 + 1


def test_ranks_share_the_connections_that_fastload_chooses() -> None:
    each = [choose_sizes(Settings(), place(k, 8), 64 * GIB, machine=HUGE) for k in range(8)]
    assert sum(sizes.concurrency for sizes in each) <= 512


@pytest.mark.parametrize("limit_bytes", [256 * MIB, GIB, 8 * GIB])
@pytest.mark.parametrize("ranks", [1, 8])
def test_e06_memory_stays_within_a_quarter_of_the_limit(limit_bytes: int, ranks: int) -> None:
    sizes = choose_sizes(Settings(), place(0, ranks), 64 * GIB, machine=machine(limit_bytes))
    assert sizes.slots * sizes.chunk_bytes <= sizes.memory_bytes <= limit_bytes // 4 // ranks
    assert sizes.slots >= 1


def test_e06_less_than_one_chunk_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfBudgetError, match=r"128\.0 MiB.*8 local ranks.*16\.0 MiB"):
        choose_sizes(Settings(chunk_bytes=16 * MIB), place(0, 8), GIB, machine=machine(128 * MIB))


def test_receivers_are_paid_from_the_budget() -> None:
    settings = Settings(memory_bytes=256 * MIB)
    remote = choose_sizes(settings, place(0, 1), 64 * GIB, machine=SMALL)
    local = choose_sizes(settings, place(0, 1), 64 * GIB, machine=SMALL, remote=False)
    assert remote.slots * remote.chunk_bytes < local.slots * local.chunk_bytes


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_small_requests_leave_the_connections_that_were_asked_for(concurrency: int) -> None:
    settings = Settings(concurrency=concurrency, chunk_bytes=64 * KIB)
    sizes = choose_sizes(settings, place(0, 1), GIB, machine=machine(8 * GIB))
    assert sizes.concurrency == sizes.start_concurrency == concurrency
    assert concurrency <= sizes.slots <= 2 * concurrency


@pytest.mark.parametrize("memory_bytes", [MIB, 3 * MIB, 64 * MIB, 10 * GIB])
@pytest.mark.parametrize("concurrency", [1, 32, 4096])
@pytest.mark.parametrize("chunk_bytes", [None, 64 * 1024, MIB])
def test_any_setting_gives_a_load_that_can_run(
    memory_bytes: int, concurrency: int, chunk_bytes: int | None
) -> None:
    settings = Settings(memory_bytes=memory_bytes, concurrency=concurrency, chunk_bytes=chunk_bytes)
    for total_bytes in (0, 1, 10 * MIB, 100 * GIB):
        sizes = choose_sizes(settings, place(0, 1), total_bytes, machine=SMALL)
        assert 1 <= sizes.start_concurrency <= sizes.concurrency
        assert sizes.slots * sizes.chunk_bytes <= memory_bytes


def test_a_cap_lets_a_quarter_of_a_second_through_at_once() -> None:
    settings = Settings(max_bytes_per_s=4_000_000)
    each = [choose_sizes(settings, place(k, 2), 64 * GIB, machine=SMALL) for k in range(2)]
    assert [sizes.policy(settings).burst_bytes for sizes in each] == [500_000, 500_000]


@pytest.mark.parametrize("total_bytes", [86 * MIB, 8 * GIB, 140 * GIB])
def test_the_node_cache_has_memory_of_its_own_where_there_is_enough(total_bytes: int) -> None:
    without = choose_sizes(Settings(concurrency=64), place(0, 1), total_bytes, machine=HUGE)
    cached = Settings(concurrency=64, node_cache=Path("/mnt/nvme"))
    sizes = choose_sizes(cached, place(0, 1), total_bytes, machine=HUGE)
    assert sizes.concurrency == without.concurrency
    assert sizes.slots - sizes.behind_slots >= without.slots - 1
    assert 0 < sizes.behind_slots * sizes.chunk_bytes <= 256 * MIB
    assert without.behind_slots == 0


def test_where_memory_is_short_the_node_cache_has_a_quarter_of_it() -> None:
    settings = Settings(memory_bytes=256 * MIB, node_cache=Path("/mnt/nvme"))
    sizes = choose_sizes(settings, place(0, 1), 64 * GIB, machine=HUGE)
    assert 0 < sizes.behind_slots <= sizes.slots // 4
    assert sizes.concurrency <= sizes.slots - sizes.behind_slots
    least = Settings(memory_bytes=32 * MIB, chunk_bytes=16 * MIB, node_cache=Path("/mnt/nvme"))
    sizes = choose_sizes(least, place(0, 1), 64 * GIB, machine=SMALL)
    assert (sizes.behind_slots, sizes.concurrency) == (0, sizes.slots)
