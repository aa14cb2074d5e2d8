"""Whatever the plan, the memory and the faults: every byte, or one typed error; no leak."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastload_common.errors import (
    AccessDeniedError,
    ObjectChangedError,
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.testing.scripted_source import Fault, ScriptedSource
from tests.common.transfer.transfer_bench import CHUNK_BYTES, Bench, content

OBJECTS = {key: content(5000, seed) for seed, key in enumerate("abc")}

chunk_places = st.tuples(
    st.sampled_from("abc"), st.integers(0, 4999), st.integers(1, CHUNK_BYTES)
).map(lambda t: (t[0], t[1], min(5000, t[1] + t[2])))
faults = st.builds(
    Fault,
    error=st.sampled_from([SourceUnavailableError] * 9 + [AccessDeniedError, RangeMismatchError]),
    good_bytes=st.integers(0, CHUNK_BYTES),
    retry_after_s=st.none() | st.just(0.001),
)


@settings(max_examples=150, deadline=None)
@given(
    places=st.lists(chunk_places, max_size=25, unique=True),
    scripts=st.lists(st.lists(faults, max_size=4), max_size=25),
    slots=st.integers(1, 6),
    concurrency=st.integers(1, 8),
    max_attempts=st.integers(1, 4),
    held=st.integers(0, 5),
)
def test_every_byte_or_one_typed_error(
    places: list[tuple[str, int, int]],
    scripts: list[list[Fault]],
    slots: int,
    concurrency: int,
    max_attempts: int,
    held: int,
) -> None:
    script = {(key, end): s for (key, _, end), s in zip(places, scripts, strict=False)}
    source = ScriptedSource(OBJECTS, script)
    bench = Bench(
        source,
        slots=slots,
        concurrency=concurrency,
        max_attempts=max_attempts,
        random=lambda: 0.0,
    )
    chunks = [
        Chunk(source.object_id(key), ByteRange(start, end), end - start)
        for key, start, end in places
    ]
    found, error = consume(bench, chunks, held=min(held, slots - 1))
    bench.fetcher.close()
    assert bench.arena.leased_count == 0
    assert source.receivers_open == 0
    assert source.peak_in_flight <= min(slots, concurrency)
    assert bench.arena.peak_leased_bytes <= slots * CHUNK_BYTES
    bench.arena.close()
    expected = bench.expected(chunks)
    assert all(expected[chunk] == data for chunk, data in found.items())
    if error is None:
        assert found.keys() == expected.keys()
        assert bench.stats.snapshot()["bytes_received"] == sum(map(len, expected.values()))
    else:
        assert any(script.values())
        assert not isinstance(error, ObjectChangedError)


def consume(
    bench: Bench, chunks: list[Chunk], held: int
) -> tuple[dict[Chunk, bytes], SourceError | None]:
    """Fetch; keep up to ``held`` chunks unreleased, as a consumer that places late does."""
    found: dict[Chunk, bytes] = {}
    kept = []
    error = None
    try:
        for filled in bench.fetcher.fetch(chunks):
            found[filled.chunk] = bytes(filled.data)
            kept.append(filled)
            if len(kept) > held:
                kept.pop(0).release()
    except SourceError as caught:
        error = caught
    for filled in kept:
        filled.release()
    return found, error
