"""What is done with the chunks of a load, without a store: order, overlaps, endings."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.checksums.algorithms import CRC32, Checksum
from fastload_common.errors import ChecksumMismatchError, SourceUnavailableError
from fastload_common.load.report import LoadReport
from fastload_common.load.verify import Verification
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.testing.scripted_source import ScriptedSource

DATA = bytes((i * 7 + i // 251) % 256 for i in range(400 * 1024 + 13))
RIGHT = Checksum(CRC32, zlib.crc32(DATA))
HEADER_BYTES = 1001


class Store(ScriptedSource):
    """One object with a checksum; its bytes can be damaged from some reading on."""

    def __init__(self, checksum: Checksum | None) -> None:
        super().__init__({"key": DATA})
        self.checksum = checksum

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        return self.checksum


class Filled:
    """A chunk whose release is noted."""

    def __init__(self, chunk: Chunk, data: bytes) -> None:
        self.chunk = chunk
        self.data = memoryview(data)
        self.released = 0

    def release(self) -> None:
        self.released += 1


class Fetching:
    """A fetch that notes what it was asked for, what it gave, and how often it was ended."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.given: list[Filled] = []
        self.data = DATA
        self.ended = 0
        self.fails = False

    def fetch(self, chunks: Iterable[Chunk]) -> Iterator[Filled]:
        return self._fetch(list(chunks))

    def _fetch(self, chunks: list[Chunk]) -> Generator[Filled, None, None]:
        try:
            for chunk in chunks:
                if self.fails:
                    raise SourceUnavailableError("no")
                span = chunk.byte_range
                self.asked.append((span.start, span.end))
                self.given.append(Filled(chunk, self.data[span.start : span.end]))
                yield self.given[-1]
        finally:
            self.ended += 1


class Load:
    """A load of the object, as far as verification sees it."""

    def __init__(self, verify: str = "covered", checksum: Checksum | None = RIGHT) -> None:
        self.report = LoadReport("test", "1", "s3://bucket/model", 0)
        self.verification = Verification(verify, self.report)
        self.fetching = Fetching()
        self.fetch = self.verification.watch(self.fetching.fetch, 65536)
        self.source = Store(checksum)
        self.object_id = self.source.object_id("key")

    def open(self) -> None:
        see = self.verification.starts(self.source)
        assert see is not None
        see(self.object_id, DATA[:HEADER_BYTES])

    def read(self, *spans: tuple[int, int]) -> None:
        chunks = [Chunk(self.object_id, ByteRange(*span), 1) for span in spans]
        for filled in self.fetch(chunks):
            assert filled.data == self.fetching.data[slice(*_ends(filled.chunk))]
            filled.release()

    def read_all(self) -> None:
        self.read(*[(s, min(s + 65536, len(DATA))) for s in range(960, len(DATA), 65536)])

    @property
    def counts(self) -> dict[str, int]:
        return {k: v for k, v in self.report.verified.items() if k != "mode" and v}


def _ends(chunk: Chunk) -> tuple[int, int]:
    return chunk.byte_range.start, chunk.byte_range.end


def test_off_is_the_fetch_itself() -> None:
    load = Load("off")
    assert load.fetch == load.fetching.fetch
    assert load.verification.starts(load.source) is None
    load.verification.finish()
    assert load.report.verified == {}


def test_an_object_read_once() -> None:
    load = Load()
    load.open()
    load.read_all()
    load.verification.finish()
    assert load.counts == {"compared": 1}
    assert all(filled.released == 1 for filled in load.fetching.given)


def test_an_object_without_a_checksum_is_not_looked_at() -> None:
    load = Load("full", None)
    load.open()
    load.fetching.data = bytes(len(DATA))
    load.read_all()
    load.verification.finish()
    assert load.counts == {"without_checksum": 1}


def test_full_reads_what_is_missing_in_pieces_of_a_slot() -> None:
    load = Load("full")
    load.open()
    load.read((960, 70_000), (300_000, len(DATA)))
    before = len(load.fetching.asked)
    load.verification.finish()
    more = load.fetching.asked[before:]
    assert more == [(s, min(s + 65536, 300_000)) for s in range(70_000, 300_000, 65536)]
    assert load.counts == {"compared": 1, "read_bytes": 230_000}
    assert all(filled.released == 1 for filled in load.fetching.given)


def test_a_range_read_again_must_be_read_to_its_end() -> None:
    """The second reading began in the first one's chunk and was used: it has to be proved."""
    load = Load()
    load.open()
    load.read_all()
    load.read((66_496, 100_000))  # 960 + 65536 = 66496: the first part of a chunk
    load.verification.finish()
    rest = (66_496 + 65_536) - 100_000
    # Up to the last multiple of 64 it is a piece of its own.
    assert load.counts == {"compared": 1, "read_bytes": rest}


def test_damage_in_a_second_reading_of_a_part_is_found_at_the_end() -> None:
    load = Load()
    load.open()
    load.read_all()
    load.fetching.data = DATA[:70_000] + b"\xff" + DATA[70_001:]
    load.read((66_496, 100_000))
    load.fetching.data = DATA
    with pytest.raises(ChecksumMismatchError, match="was read twice and differs") as caught:
        load.verification.finish()
    assert caught.value.fields["range"] == "[66496, 132032)"


def test_a_part_of_an_object_that_is_read_in_part_is_not_read_again() -> None:
    load = Load()
    load.open()
    load.read((66_496, 132_032))
    load.read((66_496, 100_000))
    load.verification.finish()
    assert load.counts == {"partly_read": 1}
    assert len(load.fetching.asked) == 2


def test_damage_ends_the_fetch_and_gives_the_slot_back() -> None:
    load = Load()
    load.open()
    load.fetching.data = DATA[:-1] + b"\xff"
    with pytest.raises(ChecksumMismatchError) as caught:
        load.read_all()
    assert load.fetching.ended == 1
    assert all(filled.released == 1 for filled in load.fetching.given)
    assert caught.value.fields["expected"] == f"0x{zlib.crc32(DATA):08x}"
    assert load.counts == {"partly_read": 1}
    with pytest.raises(ChecksumMismatchError):
        load.verification.finish()
    assert load.counts == {"partly_read": 1}


def test_a_consumer_that_leaves_ends_the_fetch() -> None:
    load = Load()
    load.open()
    chunks = [Chunk(load.object_id, ByteRange(s, s + 64), 1) for s in (1024, 2048)]
    filling = load.fetch(chunks)
    assert isinstance(filling, Generator)
    with closing(filling):
        next(filling).release()
    assert load.fetching.ended == 1


def test_what_cannot_be_read_for_it_ends_the_load() -> None:
    load = Load("full")
    load.open()
    load.fetching.fails = True
    with pytest.raises(SourceUnavailableError):
        load.verification.finish()
    assert load.counts == {"partly_read": 1}


def test_a_second_end_does_nothing_again() -> None:
    load = Load("full")
    load.open()
    load.verification.finish()
    asked = len(load.fetching.asked)
    load.verification.finish()
    assert len(load.fetching.asked) == asked
    assert load.counts == {"compared": 1, "read_bytes": len(DATA) - HEADER_BYTES}


_SPAN = st.tuples(st.integers(0, len(DATA) // 64 - 1), st.integers(1, 900)).map(
    lambda row: (row[0] * 64, min(row[0] * 64 + row[1] * 71, len(DATA)))
)


@given(reads=st.lists(st.lists(_SPAN, max_size=3), max_size=4), damaged=st.none() | _SPAN)
def test_any_reads_end_compared_or_are_told(
    reads: list[list[tuple[int, int]]], damaged: tuple[int, int] | None
) -> None:
    """Each inner list is one fetch; the damage is in all readings of one byte but the header's."""
    load = Load("full")
    load.open()
    at = None if damaged is None else damaged[1] - 1
    if at is not None:
        load.fetching.data = DATA[:at] + bytes([DATA[at] ^ 16]) + DATA[at + 1 :]
    try:
        for spans in reads:
            load.read(*spans)
        load.verification.finish()
    except ChecksumMismatchError:
        assert at is not None
    else:
        assert at is None or not any(s <= at < e for s, e in load.fetching.asked)
        assert load.counts["compared"] == 1
