"""Whatever lanes do: each chunk once with its bytes, or one error; all memory back.

The memory of the harness refuses to take a slot back that somebody still writes to.
"""

from __future__ import annotations

import random

import pytest

from fastload_common.errors import (
    DeadlineError,
    FastloadError,
    ObjectChangedError,
    SourceUnavailableError,
)
from fastload_common.transfer.hedging import Verdict
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.run import Filled
from tests.common.transfer.scheduler_harness import Bench, chunk

POLICY = TransferPolicy(3, 4, 5, 5, backoff_base_s=0.01, progress_bytes=50)


class Chance:
    """One random story."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        count = self.draw.randint(1, 8)
        edges = sorted(self.draw.sample(range(1, 4000), count))
        chunks = [chunk(a, b) for a, b in zip([0, *edges], edges, strict=False) if b > a]
        self.bench = Bench(
            chunks,
            slots=self.draw.randint(1, 6),
            slot_bytes=4096,
            policy=POLICY,
            deadline_s=self.draw.choice([None, None, 2.0]),
            random=self.draw.random,
        )
        self.chunks = chunks
        self.has_permanent = self.draw.random() < 0.1
        self.held: list[Filled] = []
        self.got: list[Filled] = []
        self.good: dict[int, int] = {}
        self.started: set[int] = set()
        self.now_s = 0.0

    def event(self) -> object | None:
        """Something that a lane may say now."""
        live = list(self.bench.lanes.live.values())
        if not live:
            return None
        attempt = self.draw.choice(live)
        have = self.good.get(attempt.id, 0)
        what = self.draw.random()
        if attempt.id not in self.started:
            self.started.add(attempt.id)
            if what < 0.9:
                return self.bench.started(attempt.id)
        if what < 0.5:
            more = self.draw.randint(have, attempt.byte_range.size_bytes)
            self.good[attempt.id] = more
            return self.bench.progress(attempt.id, more)
        if what < 0.75:
            return self.bench.done(attempt.id)
        more = self.draw.randint(have, attempt.byte_range.size_bytes)
        error: FastloadError = SourceUnavailableError("reset", status=self.draw.choice([0, 503]))
        if self.has_permanent and self.draw.random() < 0.2:
            error, more = ObjectChangedError("changed"), 0
        return self.bench.failed(attempt.id, more, error)

    def turn(self) -> None:
        self.now_s += self.draw.choice([0.0, 0.001, 0.03, 0.06])
        self.bench.verdicts.always = self.draw.choice(
            [Verdict.WAIT, Verdict.WAIT, Verdict.HEDGE, Verdict.KILL]
        )
        events = [e for _ in range(self.draw.randint(0, 3)) if (e := self.event()) is not None]
        self.bench.at(self.now_s, *events)
        arrived = self.bench.arrived() if not self.bench.run.is_over else []
        self.held += arrived
        self.got += arrived
        while self.held and self.draw.random() < 0.5:
            self.held.pop(self.draw.randrange(len(self.held))).release()

    def finish(self) -> None:
        """The consumer has left or has everything: what still runs ends in some order."""
        self.bench.run.halt()
        self.bench.at(self.now_s)
        while self.bench.lanes.live:
            if (event := self.event()) is not None:
                self.bench.at(self.now_s, event)
        for filled in self.held:
            filled.release()
        self.bench.run.release_undelivered()


@pytest.mark.parametrize("block", range(20))
def test_each_chunk_once_or_one_error_and_all_memory_back(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        story = Chance(seed)
        turns = 0
        while not story.bench.run.is_over and len(story.got) < len(story.chunks):
            story.turn()
            turns += 1
            assert turns < 5000, f"seed {seed}: no end"
        if story.draw.random() < 0.2:
            story.turn()
        story.finish()
        assert story.bench.memory.leased == {}, f"seed {seed}"
        assert story.bench.run.idle.is_set(), f"seed {seed}"
        got = [filled.chunk for filled in story.got]
        assert len(set(got)) == len(got)
        failures = story.bench.run._failures
        if not failures:
            assert sorted(got, key=lambda c: c.byte_range) == story.chunks
        for error in failures[:1]:
            assert isinstance(error, SourceUnavailableError | DeadlineError | ObjectChangedError), (
                f"seed {seed}: {error!r}"
            )
        assert not isinstance(failures[0] if failures else None, ObjectChangedError) or (
            story.has_permanent
        )


@pytest.mark.parametrize("seed", range(200))
def test_a_consumer_that_leaves_at_any_time_gets_all_memory_back(seed: int) -> None:
    story = Chance(seed)
    for _ in range(story.draw.randint(0, 12)):
        if not story.bench.run.is_over and len(story.got) < len(story.chunks):
            story.turn()
    story.finish()
    assert story.bench.memory.leased == {}
    assert story.bench.run.idle.is_set()
