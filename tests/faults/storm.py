"""Loads through random storms, and what may be left of them: nothing.

Everything is what a user has (source, receiver processes, staging memory) but the store, which is
the fault rig. A load must end in time, with the right bytes or with one error of the kind that its
faults explain.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.errors import FastloadError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.testing.rig import LoggedRequest, Rig, Storm, random_faults
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.run import Filled
from fastload_common.transfer.stats import TransferStats
from fastload_common.units import KIB
from tests.common.transfer.lanes_bench import children
from tests.faults.storm_shapes import SIZES, Session, Shape, sessions

__all__ = ["Outcome", "Weather", "ride_out"]

ROOT = "s3://storm/m"
OBJECTS = {f"storm/m/{key}": size for key, size in SIZES.items()}

# Ends are not waited for longer than a few seconds, and the machine may be busy.
MARGIN_S = 4.0
# Storms pass within three tries; the others are for receivers that are killed, and for a machine
# so busy that a reply takes longer than the read timeout.
MAX_TRIES, MAX_ATTEMPTS = 3, 8
READ_TIMEOUT_S = 0.4
_PATIENCE_S = 5.0

SETTINGS = Settings(max_attempts=MAX_ATTEMPTS, connect_timeout_s=3.0, read_timeout_s=5.0)


def policy(shape: Shape, deadline_s: float) -> TransferPolicy:
    return TransferPolicy(
        concurrency=shape.concurrency,
        max_attempts=MAX_ATTEMPTS,
        connect_timeout_s=3.0,
        read_timeout_s=READ_TIMEOUT_S,
        deadline_s=deadline_s,
        backoff_base_s=0.01,
        backoff_cap_s=0.05,
        retry_after_cap_s=0.05,
        progress_bytes=64 * KIB,
        hedging=shape.hedging,
        start_concurrency=shape.start_concurrency,
        max_bytes_per_s=shape.max_bytes_per_s,
        burst_bytes=256 * KIB,
    )


@dataclass
class Outcome:
    """What a load came to.

    Attributes:
        ended: ``bytes``, ``left`` or the name of the error.
        faults: what was wrong with it; empty: nothing.
    """

    seed: int
    storm: Storm
    shape: Shape
    ended: str = "bytes"
    took_s: float = 0.0
    error: BaseException | None = None
    faults: list[str] = field(default_factory=list)

    def check(self, is_true: object, what: str) -> None:
        if not is_true:
            self.faults.append(what)

    def __str__(self) -> str:
        said = f"{self.ended}: {self.error}" if self.error else self.ended
        notes = "".join(f"\n    {note}" for note in getattr(self.error, "__notes__", ()))
        return (
            f"seed {self.seed}: {'; '.join(self.faults) or 'well'}; {said} after "
            f"{self.took_s:.2f} s{notes}\n  {self.shape}\n  {self.storm}"
        )


class Weather:
    """The rig with the objects."""

    def __init__(self, rig: Rig, tls: bool) -> None:
        self.rig = rig
        self.tls = tls
        random = Random("storm")
        self.content = {key: random.randbytes(size) for key, size in SIZES.items()}
        for key, data in self.content.items():
            rig.put("storm", f"m/{key}", data)
        with contextlib.closing(open_source(ROOT, SETTINGS)) as source:
            self.objects = stat(source)
        rig.log.wait_until_unconnected(_PATIENCE_S)


def until(is_true: Callable[[], bool]) -> None:
    """Wait a few seconds for it."""
    end_s = time.monotonic() + _PATIENCE_S
    while not is_true() and time.monotonic() < end_s:
        time.sleep(0.005)


def stat(source: ObjectSource) -> dict[str, ObjectId]:
    return {key: source.stat(key) for key in SIZES}


def ride_out(weather: Weather, seeds: Sequence[int]) -> Iterator[Outcome]:
    """Make the loads of these seeds; several of one fetcher where the first seed says so."""
    for session in sessions(seeds):
        yield from _ride_one(weather, session)


def _ride_one(weather: Weather, session: Session) -> list[Outcome]:
    """The loads of one fetcher; nothing may be left of it."""
    before = Census.take(weather.rig)
    loader = Loader(weather, session)
    outcomes: list[Outcome] = []
    try:
        for seed, shape in zip(session.seeds, session.shapes, strict=True):
            if outcomes and loader.remaining_s < shape.deadline_s:
                break  # it gets a fetcher of its own
            outcomes.append(loader.load(seed, shape))
    finally:
        loader.close()
    last = outcomes[-1]
    for what in before.compare(weather.rig):
        last.check(False, what)
    if weather.rig.crashes:
        last.check(False, f"the rig crashed: {weather.rig.crashes.pop()!r}")
    if len(outcomes) < len(session.seeds):
        outcomes += _ride_one(weather, session.after(len(outcomes)))
    return outcomes


class Loader:
    """Source, memory and fetcher of some loads."""

    def __init__(self, weather: Weather, session: Session) -> None:
        shape = session.shapes[0]
        clock = SystemClock()
        self._weather = weather
        self._source = open_source(ROOT, SETTINGS)
        self._arena = Arena(shape.slot_bytes, shape.slots)
        deadline_s = shape.deadline_s + session.longer_s
        began_s = clock.monotonic_s()
        self._late_s = began_s + deadline_s
        self._fetcher = Fetcher(
            self._source,
            self._arena,
            policy(shape, deadline_s),
            clock,
            TransferStats(),
            started_s=began_s,
        )

    @property
    def remaining_s(self) -> float:
        return self._late_s - time.monotonic()

    def load(self, seed: int, shape: Shape) -> Outcome:
        weather = self._weather
        storm = random_faults(
            seed, OBJECTS, max_tries=MAX_TRIES, uncurable_share=0.15, tls=weather.tls
        )
        outcome = Outcome(seed, storm, shape)
        weather.rig.arrange(storm.faults)
        began_s = time.monotonic()
        try:
            self._load(shape, outcome)
        except FastloadError as error:
            outcome.ended, outcome.error = type(error).__name__, error
        except Exception as error:
            outcome.ended, outcome.error = type(error).__name__, error
            outcome.check(False, f"no error of ours: {error!r}")
        outcome.took_s = time.monotonic() - began_s
        overdue_s = -self.remaining_s
        outcome.check(overdue_s < MARGIN_S, f"{overdue_s:.1f} s after the deadline")
        # A receiver that is just being started hears of its end when it is there.
        until(lambda: not self._arena.leased_count)
        outcome.check(not self._arena.leased_count, f"{self._arena.leased_count} slots leased")
        until(lambda: not asked_still(weather.rig))
        rows = [row.as_dict() for row in asked_still(weather.rig)]
        outcome.check(not rows, f"requests left: {rows}")
        _judge(outcome)
        until(lambda: is_calm(weather.rig))
        return outcome

    def _load(self, shape: Shape, outcome: Outcome) -> None:
        with killing(shape.kill_after_s):
            objects = stat(self._source) if shape.asks_first else self._weather.objects
            consumer = Consumer(self._weather, shape, outcome)
            consumer.consume(self._fetcher, _chunks(objects, shape))

    def close(self) -> None:
        self._fetcher.close()
        self._arena.close()
        self._source.close()


def asked_still(rig: Rig) -> list[LoggedRequest]:
    """What is answered still; but a refusal without a body is whole when its head is there."""
    rows = [row for row in rig.log.requests() if row.ended is None]
    return [row for row in rows if not (row.stalled and row.status >= 300)]


def is_calm(rig: Rig) -> bool:
    """Whether nothing is answered any more; what stalls is let go on."""
    rig.release()
    return not rig.log.in_flight


def _judge(outcome: Outcome) -> None:
    storm, ended = outcome.storm, outcome.ended
    if ended == "left" or (ended == "DeadlineError" and outcome.shape.hurry_s is not None):
        return
    if ended == "bytes":
        outcome.check(storm.outcome != "error", "it must have failed")
    else:
        outcome.check(storm.outcome != "bytes", "it must have succeeded")
        outcome.check(ended in storm.errors or storm.curable, f"not with {ended}")


def _chunks(objects: dict[str, ObjectId], shape: Shape) -> list[Chunk]:
    found = []
    for key in shape.order(SIZES):
        size = SIZES[key]
        edges = [*range(0, size, shape.chunk_bytes), size]
        for start, end in itertools.pairwise(edges):
            found.append(Chunk(objects[key], ByteRange(start, end), end - start))
    return found


class Consumer:
    """Takes what comes, slowly or not, all of it or not; the bytes must be right all the while."""

    def __init__(self, weather: Weather, shape: Shape, outcome: Outcome) -> None:
        self._weather = weather
        self._shape = shape
        self._outcome = outcome
        self._held: list[Filled] = []
        self._random = Random(shape.seed)

    def consume(self, fetcher: Fetcher, chunks: list[Chunk]) -> None:
        seen: set[tuple[str, ByteRange]] = set()
        with contextlib.closing(fetcher.fetch(chunks)) as running:
            try:
                for filled in running:
                    self._look(filled)
                    seen.add((filled.chunk.object_id.uri, filled.chunk.byte_range))
                    self._held.append(filled)
                    if self._random.random() < self._shape.pause_share:
                        time.sleep(self._random.uniform(0.0, 0.03))
                    while len(self._held) > self._shape.holds:
                        self._give_back()
                    if len(seen) == self._shape.leaves_after:
                        self._outcome.ended = "left"
                        break
            finally:
                while self._held:
                    self._give_back()
        if self._outcome.ended == "bytes":
            self._outcome.check(len(seen) == len(chunks), f"{len(seen)} of {len(chunks)} chunks")

    def _give_back(self) -> None:
        filled = self._held.pop(self._random.randrange(len(self._held)))
        self._look(filled)
        filled.release()

    def _look(self, filled: Filled) -> None:
        place = filled.chunk.byte_range
        key = filled.chunk.object_id.uri.rpartition("/")[2]
        if filled.data != self._weather.content[key][place.start : place.end]:
            self._outcome.check(False, f"wrong bytes in {place} of {key}")


@dataclass(frozen=True)
class Census:
    """What this process has that a load could leave."""

    threads: frozenset[str]
    children: frozenset[int]
    descriptors: dict[int, str]
    connections: int

    @classmethod
    def take(cls, rig: Rig) -> Census:
        return cls(
            frozenset(t.name for t in threading.enumerate() if t.name.startswith("fastload")),
            frozenset(children(os.getpid())),
            descriptors(),
            rig.log.open_connections,
        )

    def compare(self, rig: Rig) -> list[str]:
        """What there is more of now; connections may take a moment to be seen as closed."""
        until(lambda: not self._more(Census.take(rig)))
        return self._more(Census.take(rig))

    def _more(self, now: Census) -> list[str]:
        found = []
        if now.threads - self.threads:
            found.append(f"threads left: {sorted(now.threads - self.threads)}")
        if now.children - self.children:
            found.append(f"processes left: {sorted(now.children - self.children)}")
        if len(now.descriptors) > len(self.descriptors):
            found.append(
                f"descriptors left: {set(now.descriptors.items()) - set(self.descriptors.items())}"
            )
        if now.connections > self.connections:
            found.append(f"{now.connections - self.connections} more connections")
        return found


def descriptors() -> dict[int, str]:
    """What this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


@contextlib.contextmanager
def killing(after_s: float | None) -> Iterator[None]:
    """Kill one receiver process after a while, or as soon as there is one."""
    if after_s is None:
        yield
        return
    over = threading.Event()

    def kill() -> None:
        over.wait(after_s)
        while not over.is_set():
            for pid, name in children(os.getpid()).items():
                if name == "fastload-recv":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                    return
            over.wait(0.01)

    thread = threading.Thread(target=kill, name="storm-kill")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
