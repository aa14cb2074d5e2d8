"""Whole layers of a registry are compared with their digest, whatever order they were used in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.checksums.algorithms import CRC32, Checksum
from fastload_common.errors import ChecksumMismatchError
from fastload_common.load.verify_object import CheckedObject, DigestedObject, checked_object
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.oci_reference import digest_of

DATA = random.Random(1).randbytes(300_000)
CHUNK_BYTES = 16 * 1024
LAYER = ObjectId("oci://r/m:v/model.safetensors", digest_of(DATA), len(DATA))
SPANS = list(ByteRange(0, len(DATA)).pieces(CHUNK_BYTES))


def digested() -> DigestedObject:
    found = checked_object(LAYER, None, everything=True)
    assert isinstance(found, DigestedObject)
    return found


def show(seen: CheckedObject, span: ByteRange, data: bytes = DATA) -> None:
    seen.see(span.start, memoryview(data)[span.start : span.end])


def read_rest(seen: CheckedObject, seed: int = 0, data: bytes = DATA) -> int:
    """As `Verification` does, in the order in which replies come; the bytes that were read."""
    chance, read_bytes = random.Random(seed), 0
    while wanted := [p for span in seen.wanted(everything=True) for p in span.pieces(CHUNK_BYTES)]:
        chance.shuffle(wanted)
        for span in wanted:
            show(seen, span, data)
            read_bytes += span.size_bytes
    return read_bytes


def test_which_objects_have_a_digest() -> None:
    crc = Checksum(CRC32, 1)
    assert type(checked_object(LAYER, crc, everything=True)) is CheckedObject
    assert checked_object(LAYER, None, everything=False) is None
    for etag in (None, '"0123"', f"{LAYER.etag}+512", "12-34"):
        assert checked_object(ObjectId("u", etag, 4), None, everything=True) is None


def test_what_came_in_order_is_not_read_again() -> None:
    seen = digested()
    for span in SPANS:
        show(seen, span)
    assert seen.is_compared
    assert read_rest(seen) == 0


@given(st.permutations(range(len(SPANS))), st.integers(0, len(SPANS)), st.integers(0, 9))
def test_any_order_ends_compared(order: list[int], count: int, seed: int) -> None:
    seen = digested()
    for index in order[:count]:
        show(seen, SPANS[index])
    assert read_rest(seen, seed) <= len(DATA)
    assert seen.is_compared


def test_a_layer_that_is_damaged_where_it_is_stored() -> None:
    seen = digested()
    damaged = DATA[:-1] + bytes([DATA[-1] ^ 1])
    show(seen, SPANS[5], damaged)
    with pytest.raises(ChecksumMismatchError, match="not what its digest says"):
        read_rest(seen, data=damaged)
    assert not seen.is_compared


def test_bytes_that_were_damaged_when_they_were_used() -> None:
    """The layer is right when it is read again, so only the comparison of both can tell."""
    seen = digested()
    show(seen, SPANS[5], bytes(len(DATA)))
    with pytest.raises(ChecksumMismatchError, match="was read twice and differs"):
        read_rest(seen)


def test_no_more_waits_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload_common.load.verify_object._MOST_WAITING_BYTES", 2 * CHUNK_BYTES)
    seen = digested()
    assert seen.wanted(everything=True)
    for span in reversed(SPANS):
        show(seen, span)
        assert sum(map(len, seen.waiting.values())) <= 2 * CHUNK_BYTES
    assert not seen.is_compared
    read_rest(seen)
    assert seen.is_compared
