"""Exchanges of several ranks in one process, over objects in memory, with faults of all kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fastload_common.clock import Clock, SystemClock
from fastload_common.exchange.card import Card
from fastload_common.exchange.meeting import Met
from fastload_common.exchange.node_exchange import NodeExchange
from fastload_common.exchange.slots import OwnChunk
from fastload_common.exchange.terms import Terms
from fastload_common.plan.geometry import View
from fastload_common.plan.records import Chunk, TensorRead
from fastload_common.ranges import ObjectId
from fastload_common.staging.arena import Arena, Slot

CHUNK_BYTES = 1024


def mets(size: int) -> list[Met]:
    """So many ranks that have met."""
    cards = [Card.make(rank) for rank in range(size)]
    lines: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            lines[low][high], lines[high][low] = socket.socketpair(
                socket.AF_UNIX, socket.SOCK_STREAM
            )
    return [
        Met(cards[rank], tuple((cards[k], lines[rank][k]) for k in sorted(lines[rank])))
        for rank in range(size)
    ]


def make_objects(count: int, size_bytes: int, seed: int = 0) -> dict[ObjectId, bytes]:
    random = Random(seed)
    return {
        ObjectId(f"s3://models/m/{k}", f'"{k}"', size_bytes): random.randbytes(size_bytes)
        for k in range(count)
    }


def read_of(object_id: ObjectId, start: int, end: int) -> TensorRead:
    return TensorRead(object_id, start, 1, View((end - start,), (1,), 0))


class FilledSlot:
    """A chunk in a slot of an arena."""

    def __init__(self, chunk: Chunk, slot: Slot, released: Callable[[], None]) -> None:
        self.chunk = chunk
        self.data = slot.memory
        self.position_bytes = slot.position_bytes
        self._slot = slot
        self._released = released

    def release(self) -> None:
        self._slot.release()
        self._released()


class MemoryFetch:
    """Fetches from objects in memory, a few at once as slots allow, in a seeded order.

    Args:
        fail_at: raise ``error`` instead of the chunk of this number.
        slow_s: sleep before each chunk.
    """

    def __init__(
        self,
        objects: dict[ObjectId, bytes],
        arena: Arena,
        *,
        seed: int = 0,
        fail_at: int | None = None,
        error: BaseException | None = None,
        slow_s: float = 0.0,
    ) -> None:
        self._objects, self._arena = objects, arena
        self._random = Random(seed)
        self._fail_at, self._error, self._slow_s = fail_at, error, slow_s
        self._freed = threading.Condition()
        self._aborted = False
        self.fetched: list[Chunk] = []

    def __call__(self, chunks: Iterable[Chunk]) -> Generator[FilledSlot, None, None]:
        queued = list(chunks)
        self._random.shuffle(queued)
        for number, chunk in enumerate(queued):
            if self._slow_s:
                time.sleep(self._slow_s)
            if number == self._fail_at and self._error is not None:
                raise self._error
            slot = self._lease(chunk.byte_range.size_bytes)
            start, end = chunk.byte_range.start, chunk.byte_range.end
            slot.memory[:] = self._objects[chunk.object_id][start:end]
            self.fetched.append(chunk)
            yield FilledSlot(chunk, slot, self._wake)

    def abort(self) -> None:
        with self._freed:
            self._aborted = True
            self._freed.notify_all()

    def _lease(self, size_bytes: int) -> Slot:
        with self._freed:
            while True:
                if self._aborted:
                    raise RuntimeError("aborted")
                slot = self._arena.try_lease(size_bytes)
                if slot is not None:
                    return slot
                self._freed.wait()

    def _wake(self) -> None:
        with self._freed:
            self._freed.notify_all()


@dataclass
class Rank:
    """One rank: what it needs, what it got, how it ended."""

    exchange: NodeExchange
    arena: Arena
    fetch: MemoryFetch
    needs: list[tuple[ObjectId, int, int]]
    got: dict[tuple[ObjectId, int, int], bytes] = field(default_factory=dict)
    error: BaseException | None = None
    ended_s: float = 0.0

    def load(self, slow_s: float = 0.0, on_chunk: Callable[[int], None] = lambda n: None) -> None:
        """Agree, copy everything out of the chunks, leave."""
        reads = [read_of(*need) for need in self.needs]
        self.exchange.agree(reads)
        pieces: dict[tuple[ObjectId, int, int], bytearray] = {
            need: bytearray(need[2] - need[1]) for need in self.needs
        }
        for number, filled in enumerate(self.exchange.fetch()):
            try:
                on_chunk(number)
                if slow_s:
                    time.sleep(slow_s)
                self._copy(filled, pieces)
            finally:
                filled.release()
        self.got = {need: bytes(value) for need, value in pieces.items()}
        self.exchange.leave()

    @staticmethod
    def _copy(filled: OwnChunk, pieces: dict[tuple[ObjectId, int, int], bytearray]) -> None:
        chunk = filled.chunk
        for (object_id, start, end), value in pieces.items():
            low = max(start, chunk.byte_range.start)
            high = min(end, chunk.byte_range.end)
            if object_id == chunk.object_id and low < high:
                base = chunk.byte_range.start
                value[low - start : high - start] = filled.data[low - base : high - base]

    def run(self, work: Callable[[Rank], None]) -> None:
        """Do something as this rank, and end as a session does."""
        try:
            try:
                work(self)
            except BaseException as error:
                self.error = error
                self.exchange.end(error)
            else:
                self.exchange.end()
        except BaseException as error:
            self.error = error
        self.ended_s = time.monotonic()
        self.arena.close()


@contextlib.contextmanager
def ranks(
    objects: dict[ObjectId, bytes],
    needs: Sequence[Sequence[tuple[ObjectId, int, int]]],
    *,
    slots: Sequence[int] | int = 2,
    clock: Clock | None = None,
    gap_bytes: int = 0,
    by_object: bool = False,
    fetches: dict[int, dict[str, object]] | None = None,
    deadline_s: float | None = None,
) -> Iterator[list[Rank]]:
    """Ranks that have met and offered their memory."""
    size = len(needs)
    counts = [slots] * size if isinstance(slots, int) else list(slots)
    made = []
    clock = clock or SystemClock()
    for rank, met in enumerate(mets(size)):
        arena = Arena(CHUNK_BYTES, counts[rank])
        options = (fetches or {}).get(rank, {})
        fetch = MemoryFetch(objects, arena, seed=rank, **options)  # type: ignore[arg-type]
        exchange = NodeExchange(
            met,
            clock,
            deadline_s=None if deadline_s is None else clock.monotonic_s() + deadline_s,
            limit_s=deadline_s,
        )
        exchange.offer(
            Terms(
                arena_fd=arena.fd,
                arena_bytes=arena.size_bytes,
                objects=tuple(objects),
                chunk_bytes=CHUNK_BYTES,
                gap_bytes=gap_bytes,
                by_object=by_object,
                headers=b"",
                fetch=fetch,
                abort=fetch.abort,
            )
        )
        made.append(Rank(exchange, arena, fetch, list(needs[rank])))
    try:
        yield made
    finally:
        for row in made:
            with contextlib.suppress(BaseException):
                row.exchange.end(RuntimeError("the test has ended"))
            row.arena.close()


def run_all(
    made: Sequence[Rank],
    work: Callable[[Rank], None] | Sequence[Callable[[Rank], None]] = Rank.load,
    *,
    timeout_s: float = 30,
) -> None:
    """Let all ranks work, each in a thread, until all have ended."""
    works = [work] * len(made) if callable(work) else list(work)
    threads = [
        threading.Thread(target=row.run, args=(one,), name=f"rank-{k}")
        for k, (row, one) in enumerate(zip(made, works, strict=True))
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    alive = [thread.name for thread in threads if thread.is_alive()]
    assert not alive, f"did not end: {alive}"


def all_is_right(made: Sequence[Rank], objects: dict[ObjectId, bytes]) -> None:
    """Every rank has what it needs, and no slot is held; raises the error of one that failed."""
    for row in made:
        if row.error is not None:
            raise row.error
        for (one, start, end), value in row.got.items():
            assert value == objects[one][start:end]
        assert row.arena.leased_count == 0


def with_terms(row: Rank, **changes: Any) -> None:
    """What a rank offered, as if it had been other terms."""
    row.exchange._terms = dataclasses.replace(row.exchange._its_terms(), **changes)
    row.exchange._by_object = row.exchange._its_terms().by_object
