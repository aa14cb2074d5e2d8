"""Chunks from the cache beside chunks from the source, to the byte; and what is kept of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload_common.clock import SystemClock
from fastload_common.errors import AccessDeniedError, StagingError
from fastload_common.range_cache.entry import Entry
from fastload_common.range_cache.records import BLOCK_BYTES
from fastload_common.range_cache.supply import CacheSupply
from fastload_common.ranges import ByteRange
from fastload_common.testing.scripted_source import Fault
from fastload_common.transfer.run import Run
from tests.common.range_cache.cache_bench import CHUNK_BYTES, DATA, SIZE_BYTES, CacheBench, hold

EVERYTHING = ByteRange(0, SIZE_BYTES)
# Of each chunk the first part.
PARTS = [
    ByteRange(start, min(start + CHUNK_BYTES // 3, SIZE_BYTES))
    for start in range(0, SIZE_BYTES, CHUNK_BYTES)
]
PLACES = st.integers(0, SIZE_BYTES)
RANGES = st.tuples(PLACES, PLACES).map(sorted).filter(lambda r: r[0] < r[1])


def bytes_of(ranges: list[ByteRange]) -> set[int]:
    """Every 97th byte: fine enough to tell ranges apart."""
    return {k for r in ranges for k in range(r.start + -r.start % 97, r.end, 97)}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    held=st.lists(RANGES, max_size=4),
    damaged=st.lists(PLACES, max_size=3),
    step=st.integers(CHUNK_BYTES // 3, CHUNK_BYTES),
    start=st.integers(0, SIZE_BYTES - 1),
    slots=st.integers(1, 6),
)
def test_the_source_is_asked_for_what_is_not_held_and_good(
    tmp_path_factory: pytest.TempPathFactory,
    held: list[list[int]],
    damaged: list[int],
    step: int,
    start: int,
    slots: int,
) -> None:
    root = tmp_path_factory.mktemp("nvme")
    data = hold(root, [ByteRange(*row) for row in held])
    with data.open("r+b") as file:
        for place in damaged:
            file.seek(place)
            file.write(bytes([DATA[place] ^ 1]) if place < SIZE_BYTES else b"")
    with CacheBench(root, slots=slots) as bench:
        chunks = bench.chunks(step, start)
        bench.read(chunks)
        asked = bytes_of(bench.asked())
        wanted = bytes_of([ByteRange(start, SIZE_BYTES)])
        good = bytes_of([ByteRange(*row) for row in held])
        spoilt = {k for place in damaged for k in bytes_of([_block(place)])}
        assert asked >= wanted - good
        assert asked <= wanted - (good - spoilt)
        assert bench.stats.snapshot()["retries"] == 0
    with CacheBench(root, slots=slots) as bench:
        bench.read(bench.chunks(CHUNK_BYTES, start))
        assert bench.cache.damaged_bytes <= len(damaged) * BLOCK_BYTES
        if slots > 4 and not damaged:
            assert bench.asked() == []


def _block(place: int) -> ByteRange:
    start = place - place % BLOCK_BYTES
    return ByteRange(start, min(start + BLOCK_BYTES, SIZE_BYTES))


def test_all_from_the_cache_asks_for_nothing(root: Path) -> None:
    hold(root, [EVERYTHING])
    with CacheBench(root) as bench:
        bench.read(bench.chunks())
        assert bench.asked() == []
        assert bench.cache.read_bytes == bench.cache.chunk_bytes == SIZE_BYTES
        assert bench.cache.facts()["kept_bytes"] == 0


def test_all_from_the_source_is_kept(root: Path) -> None:
    with CacheBench(root) as bench:
        bench.read(bench.chunks())
        assert bench.stats.snapshot()["requests"] == len(bench.chunks())
    facts = bench.cache.facts()
    assert facts["kept_bytes"] + facts["dropped_bytes"] == SIZE_BYTES
    assert facts["pending_bytes"] == facts["read_bytes"] == 0
    assert facts["dropped_bytes"] == 0


def test_only_the_missing_part_of_a_chunk_is_asked_for(root: Path) -> None:
    hold(root, [ByteRange(0, 1000), ByteRange(5000, 200_000)])
    with CacheBench(root) as bench:
        bench.read(bench.chunks()[:1])
        assert bench.asked() == [ByteRange(1000, 5000), ByteRange(200_000, CHUNK_BYTES)]
        assert bench.cache.chunk_bytes == 1000 + 195_000


@pytest.mark.parametrize("missing", ["fastload-cache-", "fastload-cache-watch"])
@pytest.mark.parametrize("held", [[EVERYTHING], PARTS])
def test_without_threads_everything_comes_from_the_source(
    root: Path, monkeypatch: pytest.MonkeyPatch, missing: str, held: list[ByteRange]
) -> None:
    """Where no thread can be started; what the source brought of a chunk may come before or after
    that is found out."""
    hold(root, held)
    start = threading.Thread.start

    def fails(self: threading.Thread) -> None:
        if self.name.startswith(missing):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails)
    with CacheBench(root) as bench:
        bench.read(bench.chunks())
        assert "no thread to read with: can't start new thread" in bench.cache.facts()["reason"]
        if missing == "fastload-cache-":
            assert bytes_of(bench.asked()) == bytes_of([EVERYTHING])


def test_chunks_that_come_after_the_last_reader_hung_come_from_the_source(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads any more, and nobody looks whether anybody does."""
    hold(root, PARTS)
    with CacheBench(root) as bench:
        chunks = bench.chunks()
        run = Run(chunks, SystemClock())
        supply = CacheSupply(bench.cache, bench.arena, 1, SystemClock())
        supply.begin(run)
        bench.cache.give_up("a test")
        slot = bench.arena.try_lease(CHUNK_BYTES)
        assert slot is not None
        assert not run.complete(chunks[0], slot)
        ((index, returned, ranges),) = run.returned
        assert (index, returned, list(ranges)) == (0, slot, [PARTS[0]])
        assert run.complete(chunks[0], slot)
        assert supply.source_parts(chunks[0]) == [*run.missing[0], PARTS[0]]
        slot.release()
        supply.end()


def test_memory_is_held_until_it_is_written_and_not_longer(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    writes = Entry.write

    def slow(self: Entry, *args: Any) -> Any:
        assert go_on.wait(30)
        return writes(self, *args)

    monkeypatch.setattr(Entry, "write", slow)
    with CacheBench(root, slots=8, budget_bytes=3 * CHUNK_BYTES) as bench:
        bench.read(bench.chunks())
        assert bench.arena.leased_count == 3
        facts = bench.cache.facts()
        assert facts["pending_bytes"] == 3 * CHUNK_BYTES
        assert facts["dropped_bytes"] == SIZE_BYTES - 3 * CHUNK_BYTES
        go_on.set()
    assert bench.cache.facts()["kept_bytes"] == 3 * CHUNK_BYTES


def test_a_consumer_that_leaves_early_ends_everything(root: Path) -> None:
    hold(root, [ByteRange(0, SIZE_BYTES // 2)])
    with CacheBench(root) as bench:
        fetching = bench.fetch(bench.chunks())
        next(fetching).release()
        fetching.close()
        assert bench.cache.join(0) or bench.cache.facts()["pending_bytes"] >= 0
        # And another one may follow.
        bench.read(bench.chunks())
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("fastload-cache")]


def test_an_error_of_the_source_is_raised(root: Path) -> None:
    hold(root, [ByteRange(0, SIZE_BYTES - 1000)])
    faults = {("a", SIZE_BYTES): [Fault(AccessDeniedError)]}
    with CacheBench(root, faults=faults) as bench, pytest.raises(AccessDeniedError):
        bench.read(bench.chunks())


def test_memory_that_cannot_be_had_is_an_error(root: Path) -> None:
    hold(root, [EVERYTHING])
    with CacheBench(root) as bench:
        bench.arena.close()
        with pytest.raises(StagingError, match="closed while chunks were read"):
            bench.read(bench.chunks())


def test_a_read_that_hangs_keeps_its_memory_and_nobody_else(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(root, [ByteRange(0, 2 * BLOCK_BYTES)])
    answer = threading.Event()
    hung = threading.Event()
    preadv = os.preadv

    def hangs(fd: int, buffers: Any, offset: int) -> int:
        if not hung.is_set():
            hung.set()
            assert answer.wait(30)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hangs)
    with CacheBench(root, slots=4, patience_s=0.2) as bench:
        bench.read(bench.chunks())
        assert bench.arena.leased_count == 1
        assert "did not end within" in bench.cache.facts()["reason"]
        answer.set()
        for _ in range(200):
            if not bench.arena.leased_count:
                break
            threading.Event().wait(0.01)
