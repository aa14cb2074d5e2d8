"""How many requests, and how large."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.transfer.observed import Observed
from fastload_common.transfer.sizing import (
    Connections,
    Ramp,
    choose_chunk_bytes,
    choose_concurrency,
    part_bytes,
)
from fastload_common.units import GIB, KIB, MIB
from tests.common.transfer.slow_store import Network, Simulation

UNKNOWN = Observed()


def seen(first_byte_s: float, bytes_per_s: float) -> Observed:
    observed = Observed()
    for _ in range(32):
        observed.add(
            first_byte_s=first_byte_s,
            total_s=first_byte_s + MIB / bytes_per_s,
            size_bytes=MIB,
            new_connection=False,
        )
    return observed


# Concurrency


@pytest.mark.parametrize(
    ("given", "start", "maximum"),
    [
        ({}, 32, 128),
        ({"cpu_count": 2}, 32, 64),
        ({"cpu_count": 192}, 128, 512),
        ({"cpu_count": 192, "ranks": 8}, 16, 64),
        ({"ranks": 8}, 8, 16),
        ({"ranks": 100}, 1, 1),
        ({"ranks": 0}, 32, 128),
        ({"descriptor_limit": 104}, 32, 40),
        ({"descriptor_limit": 10}, 1, 1),
        ({"slots": 20}, 20, 20),
        ({"remaining_bytes": 5 * MIB + 1}, 6, 6),
        ({"remaining_bytes": 0}, 1, 1),
    ],
)
def test_concurrency(given: dict[str, int], start: int, maximum: int) -> None:
    plain = {
        "cpu_count": 8,
        "descriptor_limit": 65536,
        "ranks": 1,
        "slots": 1000,
        "remaining_bytes": 100 * GIB,
    }
    assert choose_concurrency(**(plain | given)) == Connections(start, maximum)


# Chunks


@pytest.mark.parametrize(
    ("total_bytes", "memory_bytes", "connections", "chunk_bytes"),
    [
        (140 * GIB, 4 * GIB, 128, 16 * MIB),
        (140 * GIB, 4 * GIB, 32, 16 * MIB),
        (140 * GIB, 320 * MIB, 32, 8 * MIB),
        (140 * GIB, 319 * MIB, 32, 4 * MIB),
        (2 * GIB, 4 * GIB, 32, 8 * MIB),
        (256 * MIB, 4 * GIB, 32, 1 * MIB),
        (1, 1, 1, 1 * MIB),
        (0, 0, 0, 1 * MIB),
        (100 * MIB, 4 * GIB, 1, 8 * MIB),
    ],
)
def test_chunks(total_bytes: int, memory_bytes: int, connections: int, chunk_bytes: int) -> None:
    found = choose_chunk_bytes(
        total_bytes=total_bytes, memory_bytes=memory_bytes, connections=connections
    )
    assert found == chunk_bytes


@given(st.integers(0, 10**13), st.integers(0, 10**12), st.integers(1, 4096))
def test_a_chunk_is_a_power_of_two_that_fits(total: int, memory: int, connections: int) -> None:
    found = choose_chunk_bytes(total_bytes=total, memory_bytes=memory, connections=connections)
    assert MIB <= found <= 16 * MIB
    assert found & (found - 1) == 0
    assert found == MIB or found * connections * 1.25 <= memory


# Parts


@pytest.mark.parametrize(
    ("remaining_bytes", "observed", "expected"),
    [
        (4 * GIB, seen(0.03, 90e6), 8 * MIB),
        (512 * MIB, seen(0.03, 90e6), 8 * MIB),
        (256 * MIB, seen(0.03, 90e6), 4 * MIB),
        (256 * MIB, UNKNOWN, 4 * MIB),
        (64 * MIB, UNKNOWN, 1 * MIB),
        (16 * MIB, seen(0.03, 90e6), 44 * 64 * KIB),  # the worth of a first byte and 2 ms: 2.9 MB
        (16 * MIB, seen(0.03, 15e6), 8 * 64 * KIB),
        (16 * MIB, seen(0.001, 15e6), 256 * KIB),
        (16 * MIB, seen(0.5, 90e6), 8 * MIB),
        (1, seen(0.03, 15e6), 8 * 64 * KIB),
    ],
)
def test_parts_are_whole_chunks_first_and_smaller_near_the_end(
    remaining_bytes: int, observed: Observed, expected: int
) -> None:
    found = part_bytes(
        chunk_bytes=8 * MIB, remaining_bytes=remaining_bytes, connections=32, observed=observed
    )
    assert found == expected


def test_the_first_requests_have_sizes_of_their_own() -> None:
    left = [4 * GIB - number * 8 * MIB for number in range(9)]
    sizes = [
        part_bytes(chunk_bytes=8 * MIB, remaining_bytes=size, connections=32, observed=UNKNOWN)
        for size in left
    ]
    assert sorted(set(sizes)) == [half * MIB // 2 for half in range(8, 16)]
    assert sizes[0] == sizes[8]


@given(
    st.integers(1, 64 * MIB),
    st.integers(1, 10**12),
    st.integers(1, 1000),
    st.sampled_from([UNKNOWN, seen(0.03, 90e6), seen(10.0, 1.0), seen(0.0, 1e12)]),
)
def test_parts_fit_their_chunk_and_are_multiples_of_64_kib(
    chunk_bytes: int, remaining_bytes: int, connections: int, observed: Observed
) -> None:
    found = part_bytes(
        chunk_bytes=chunk_bytes,
        remaining_bytes=remaining_bytes,
        connections=connections,
        observed=observed,
    )
    assert 0 < found <= chunk_bytes
    assert found == chunk_bytes or found % (64 * KIB) == 0
    assert found == chunk_bytes or found >= 256 * KIB


# The ramp


class Link:
    """Connections that are always busy; the rate is a function of how many there are."""

    def __init__(self, ramp: Ramp, rate: Callable[[float, int], float]) -> None:
        self.ramp = ramp
        self.now_s = 0.0
        self.steps: list[tuple[float, int]] = [(0.0, ramp.target)]
        self._rate = rate

    def run(self, until_s: float, size_bytes: float = 1e6, in_flight: float = 1.0) -> None:
        while self.now_s < until_s:
            target = self.ramp.target
            self.ramp.busy(self.now_s, int(target * in_flight))
            self.now_s += size_bytes / self._rate(self.now_s, target)
            self.ramp.received(self.now_s, int(size_bytes))
            if self.ramp.target != target:
                self.steps.append((self.now_s, self.ramp.target))

    def targets(self) -> list[int]:
        return [target for _, target in self.steps]


def test_it_grows_by_half_while_that_brings_more() -> None:
    link = Link(Ramp(32, 256), lambda now_s, target: target * 50e6)
    link.run(10.0)
    assert link.targets() == [32, 48, 72, 108, 162, 243, 256]
    # An epoch to settle and one to measure, for each step.
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(link.steps)]
    assert all(gap == pytest.approx(0.6, abs=0.05) for gap in gaps)


def test_a_full_link_takes_the_step_back_and_is_tried_again_rarely() -> None:
    link = Link(Ramp(32, 256), lambda now_s, target: 500e6)
    link.run(60.0)
    assert set(link.targets()) == {32, 48}
    assert link.ramp.target == 32
    tried_s = [at_s for at_s, target in link.steps if target == 48]
    assert len(tried_s) <= 5
    gaps = [b - a for a, b in itertools.pairwise(tried_s)]
    assert gaps == sorted(gaps)


def test_it_stops_where_the_link_is_full() -> None:
    link = Link(Ramp(32, 512), lambda now_s, target: min(target, 100) * 50e6)
    link.run(7.0)
    assert link.ramp.target == 108
    assert max(link.targets()) == 162


def test_it_finds_out_when_the_link_becomes_faster() -> None:
    link = Link(Ramp(32, 256), lambda now_s, target: min(target, 32 if now_s < 10 else 1000) * 50e6)
    link.run(60.0)
    assert link.ramp.target == 256


def test_noise_does_not_make_it_climb() -> None:
    # Up to 5 % to either side, in waves of 1.7 s.
    link = Link(Ramp(32, 256), lambda now_s, target: 500e6 * (0.95 + 0.1 * (now_s % 1.7 < 0.85)))
    link.run(120.0)
    assert max(link.targets()) <= 108
    assert link.ramp.target <= 72


def test_connections_that_are_not_in_use_prove_nothing() -> None:
    link = Link(Ramp(32, 256), lambda now_s, target: target * 50e6)
    link.run(5.0, in_flight=0.8)
    assert link.targets() == [32]
    link.run(6.5, in_flight=1.0)
    assert link.ramp.target > 32


def test_the_maximum_is_kept() -> None:
    link = Link(Ramp(32, 40), lambda now_s, target: target * 50e6)
    link.run(10.0)
    assert link.targets() == [32, 40]
    assert Ramp(100, 40).target == 40
    assert Ramp(0, 0).target == 1
    assert repr(Ramp(32, 256)) == "Ramp(32 of 256)"


def test_bytes_in_pieces_are_as_good_as_whole_requests() -> None:
    whole = Link(Ramp(32, 256), lambda now_s, target: min(target, 100) * 50e6)
    whole.run(7.0, size_bytes=8e6)
    pieces = Link(Ramp(32, 256), lambda now_s, target: min(target, 100) * 50e6)
    pieces.run(7.0, size_bytes=1e5)
    assert whole.ramp.target == pieces.ramp.target == 108


@pytest.mark.parametrize(
    ("link_bytes_per_s", "least_share"), [(500e6, 0.97), (2e9, 0.95), (5e9, 0.88)]
)
def test_a_load_in_virtual_time_fills_its_link(link_bytes_per_s: float, least_share: float) -> None:
    size_bytes = int(link_bytes_per_s * 8)
    network = Network(link_bytes_per_s=link_bytes_per_s, sigma=0.2)
    outcome = Simulation(network, size_bytes, connections=32, maximum=256).run()
    assert size_bytes / outcome.wall_s >= least_share * link_bytes_per_s
    assert outcome.hedges == 0


def test_a_full_link_does_not_get_more_connections_without_end() -> None:
    outcome = Simulation(Network(), 8 * GIB, connections=32, maximum=256).run()
    assert outcome.most_in_flight <= 72
