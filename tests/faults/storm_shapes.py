"""What is random about the loads of a storm, besides the faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from fastload_common.units import KIB, MIB

__all__ = ["SIZES", "Session", "Shape", "blocks", "sessions"]

SIZES = {"a": 300_001, "b": 30_000, "c": MIB + 77, "d": 1}

# Seeds that are run in one go, so that a load is the same in whatever company it is run.
_BLOCK = 20

# One fetcher may serve so many loads, one after the other, and has so much more time for each.
_MOST_LOADS = 5
_LONGER_S = 2.0


@dataclass(frozen=True)
class Shape:
    """How one load is made.

    Attributes:
        slot_bytes, slots: the staging memory.
        holds: chunks that the consumer keeps while it takes more; fewer than the slots.
        pause_share: after so many of its chunks the consumer sleeps for some milliseconds.
        leaves_after: it closes the iterator after so many; None: it stays.
        kill_after_s: a receiver process is killed then.
        asks_first: whether the objects are looked up in the storm.
        hurry_s: a deadline that it may miss; None: one that is long enough.
    """

    seed: int
    chunk_bytes: int
    slot_bytes: int
    slots: int
    concurrency: int
    start_concurrency: int | None
    hedging: bool
    max_bytes_per_s: float | None
    holds: int
    pause_share: float
    leaves_after: int | None
    kill_after_s: float | None
    asks_first: bool
    hurry_s: float | None = None

    @property
    def turns(self) -> float:
        """How many chunks each connection gets."""
        busy = min(self.slots - self.holds, self.concurrency)
        return sum(SIZES.values()) / self.chunk_bytes / busy

    @property
    def deadline_s(self) -> float:
        """Enough for two stalls of each chunk, and for the pauses that a busy store is given."""
        return 20.0 + 1.0 * self.turns if self.hurry_s is None else self.hurry_s

    def order(self, keys: Iterable[str]) -> list[str]:
        found = list(keys)
        Random(f"order {self.seed}").shuffle(found)
        return found


@dataclass(frozen=True)
class Session:
    """Loads by one fetcher."""

    seeds: Sequence[int]
    shapes: Sequence[Shape]

    @property
    def longer_s(self) -> float:
        return _LONGER_S * (len(self.seeds) - 1)

    def after(self, count: int) -> Session:
        """Without the first ones."""
        return Session(self.seeds[count:], self.shapes[count:])


def blocks(seeds: Iterable[int]) -> Iterator[list[int]]:
    """The seeds, and those that must be run before them, all even or all odd."""
    wanted = set(seeds)
    for number, odd in sorted({(seed // _BLOCK, seed % 2) for seed in wanted}):
        block = list(range(number * _BLOCK + odd, (number + 1) * _BLOCK, 2))
        yield block[: max(block.index(seed) for seed in wanted.intersection(block)) + 1]


def sessions(seeds: Sequence[int]) -> Iterator[Session]:
    """Half of the loads have a fetcher of their own."""
    left = list(seeds)
    while left:
        random = Random(f"session {left[0]}")
        count = 1 if random.random() < 0.75 else random.randrange(2, _MOST_LOADS + 1)
        taken, left = left[:count], left[count:]
        first = _shape(taken[0])
        if count == 1 and random.random() < 0.08:
            first = replace(first, hurry_s=random.uniform(0.1, 1.5))
        yield Session(taken, [first, *(_like(first, seed) for seed in taken[1:])])


def _shape(seed: int) -> Shape:
    random = Random(f"shape {seed}")
    slots = random.choice((1, 2, 3, 4, 6, 8, 12))
    concurrency = random.randrange(1, 13)
    # Little memory for one connection would make a long load of many stalls.
    holds = random.choice((0, 0, random.randrange(slots)))
    least = 16 * 12 // min(slots - holds, concurrency)
    slot_bytes = random.choice((least, least, 128, 256, 512, 1024)) * KIB + random.choice((0, 1))
    return Shape(
        seed=seed,
        chunk_bytes=random.choice((slot_bytes, slot_bytes, slot_bytes * 2 // 3)),
        slot_bytes=slot_bytes,
        slots=slots,
        concurrency=concurrency,
        start_concurrency=random.choice((None, random.randrange(1, concurrency + 1))),
        hedging=random.random() < 0.85,
        max_bytes_per_s=4e6 if random.random() < 0.05 else None,
        holds=holds,
        pause_share=random.choice((0.0, 0.0, 0.1, 0.8)),
        leaves_after=random.randrange(1, 8) if random.random() < 0.1 else None,
        kill_after_s=random.choice((0.0, random.uniform(0, 0.3)))
        if random.random() < 0.1
        else None,
        asks_first=random.random() < 0.2,
    )


def _like(first: Shape, seed: int) -> Shape:
    """Another load by the same fetcher."""
    other = _shape(seed)
    return replace(
        first,
        seed=seed,
        pause_share=other.pause_share,
        leaves_after=other.leaves_after,
        kill_after_s=None,
        asks_first=other.asks_first,
    )
