"""The rules for slow requests, on whole loads in virtual time.

30 ms to the first byte, 90 MB/s a connection, a link of 500 MB/s, 32 connections, 8 MiB chunks.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from fastload_common.units import GIB, MIB
from tests.common.transfer.slow_store import Fate, Network, Outcome, Simulation

CLEAN = Network()
FAULTY = replace(CLEAN, slow_share=0.10, slow_factor=3, stall_share=0.01)
DEAD = Fate(math.inf, 90e6)


def load(network: Network, size_bytes: int = 2 * GIB, seed: int = 1) -> Outcome:
    return Simulation(network, size_bytes, seed=seed).run()


@pytest.mark.parametrize(("size_gib", "seeds", "worst"), [(2, 12, 1.15), (4, 4, 1.07)])
def test_slow_and_dead_requests_cost_next_to_nothing(
    size_gib: int, seeds: int, worst: float
) -> None:
    clean = load(CLEAN, size_gib * GIB)
    faulty = [load(FAULTY, size_gib * GIB, seed) for seed in range(seeds)]
    ratios = [outcome.wall_s / clean.wall_s for outcome in faulty]
    assert statistics.median(ratios) <= 1.08
    assert max(ratios) <= worst
    assert max(outcome.extra_share for outcome in faulty) <= 0.005
    # Of 256 to 512 requests, 1 % are dead: about one hedge for each, and a few at the end.
    assert max(outcome.hedges for outcome in faulty) <= 16


def test_without_faults_nothing_is_asked_twice_and_the_link_is_full() -> None:
    outcome = load(CLEAN)
    assert (outcome.hedges, outcome.kills) == (0, 0)
    assert outcome.extra_share == pytest.approx(0, abs=1e-6)
    assert 2 * GIB / outcome.wall_s >= 0.98 * CLEAN.link_bytes_per_s


@pytest.mark.parametrize(("sigma", "most"), [(0.5, 1), (1.0, 8)])
def test_a_lognormal_latency_leads_to_few_hedges(sigma: float, most: int) -> None:
    for seed in range(4):
        outcome = load(replace(CLEAN, sigma=sigma), seed=seed)
        assert outcome.hedges <= most
        assert outcome.kills <= 2
        assert outcome.extra_share <= 0.02


@pytest.mark.parametrize(
    ("link_at", "size_bytes"),
    [
        (((2.0, 50e6),), GIB + 256 * MIB),
        (((2.0, 5e6), (5.0, 500e6)), 2 * GIB),
        (((1.0, 100e6), (2.0, 500e6), (3.0, 60e6), (4.0, 500e6)), 2 * GIB),
    ],
    ids=["ten times slower", "a hundred times slower for 3 s", "up and down"],
)
def test_when_the_link_slows_down_nothing_is_asked_twice(
    link_at: tuple[tuple[float, float], ...], size_bytes: int
) -> None:
    outcome = load(replace(CLEAN, link_at=link_at), size_bytes)
    assert (outcome.hedges, outcome.kills) == (0, 0)


@pytest.mark.parametrize("link_bytes_per_s", [5e6, 1e6])
def test_a_link_that_was_always_slow_is_left_alone(link_bytes_per_s: float) -> None:
    """At 1 MB/s each of 32 connections gets less than the floor of 64 KiB/s."""
    network = replace(CLEAN, link_bytes_per_s=link_bytes_per_s)
    size_bytes = int(12 * link_bytes_per_s)
    outcome = Simulation(network, size_bytes, chunk_bytes=MIB).run()
    assert (outcome.hedges, outcome.kills) == (0, 0)


def test_a_link_that_stands_still_for_three_seconds_is_waited_for() -> None:
    outcome = load(replace(CLEAN, link_at=((2.0, 1e-3), (5.0, 500e6))))
    assert (outcome.hedges, outcome.kills) == (0, 0)
    assert outcome.wall_s <= load(CLEAN).wall_s + 3.1


def test_a_store_that_is_always_slow_to_answer_is_not_asked_again_and_again() -> None:
    outcome = load(replace(CLEAN, first_byte_s=2.5), 512 * MIB)
    # Eight try before anything is known.
    assert outcome.hedges <= 8
    assert outcome.kills == 0
    assert outcome.extra_share <= 0.01


@pytest.mark.parametrize(
    ("fate", "within_s"),
    [(DEAD, 2.5), (Fate(0.03, 90e6, 0.0), 5.0), (Fate(0.03, 1000.0), 5.0)],
    ids=["no head", "a head and no more", "a trickle"],
)
def test_a_load_recovers_when_all_its_first_requests_stall(fate: Fate, within_s: float) -> None:
    stalled = Simulation(CLEAN, GIB, fate_of=lambda number, size: fate if number < 32 else None)
    outcome = stalled.run()
    assert outcome.wall_s <= load(CLEAN, GIB).wall_s + within_s
    assert outcome.extra_share <= 0.01


def test_it_recovers_when_the_first_hedges_stall_as_well() -> None:
    stalled = Simulation(CLEAN, GIB, fate_of=lambda number, size: DEAD if number < 48 else None)
    assert stalled.run().wall_s <= load(CLEAN, GIB).wall_s + 12


def test_objects_that_are_slow_by_nature_come_at_last() -> None:
    """Many requests are for a cold object, which takes five seconds whoever asks."""
    cold_sizes = {7 * MIB, 5 * MIB, 4 * MIB}
    cold = Simulation(
        CLEAN, GIB, fate_of=lambda number, size: Fate(5.0, 90e6) if size in cold_sizes else None
    )
    outcome = cold.run()
    assert outcome.wall_s <= 15
    assert outcome.most_attempts <= 8
    assert outcome.extra_share <= 0.01


def test_one_connection_that_is_slow_is_overtaken() -> None:
    slow = Simulation(
        CLEAN, 4 * GIB, fate_of=lambda number, size: Fate(0.03, 0.3e6) if number == 40 else None
    )
    outcome = slow.run()
    assert outcome.hedges >= 1
    assert outcome.wall_s <= 1.02 * load(CLEAN, 4 * GIB).wall_s


def test_a_simulation_can_be_repeated() -> None:
    assert load(FAULTY, GIB, seed=7) == load(FAULTY, GIB, seed=7)
