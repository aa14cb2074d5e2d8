"""What ranks tell of their terms: refused where it makes no sense, and who then reads alone."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest

from fastload_common.errors import FastloadError, PeerError
from fastload_common.exchange.part import divide
from fastload_common.exchange.words import Told, Word
from fastload_common.plan.needs import Needs
from fastload_common.ranges import ObjectId
from tests.common.exchange.node_harness import (
    CHUNK_BYTES,
    MemoryFetch,
    Rank,
    all_is_right,
    make_objects,
    ranks,
    run_all,
    with_terms,
)

OBJECTS = make_objects(3, 20 * CHUNK_BYTES)
IDS = list(OBJECTS)
ALL = [(one, 0, one.size_bytes) for one in IDS]


def spans_of(*rows: tuple[int, int]) -> bytes:
    spans = [np.array([row], dtype=np.int64) for row in rows]
    none = np.empty((0, 2), dtype=np.int64)
    return Needs((*spans, *[none] * (len(IDS) - len(spans))), 0).encode()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"chunk_bytes": 0}, "chunks of 0 bytes"),
        ({"chunk_bytes": 63}, "chunks of 63 bytes"),
        ({"chunk_bytes": 1 << 60}, "chunks of"),
        ({"gap_bytes": (1 << 64) - 1}, "gaps of"),
        ({"needs": spans_of((0, 20 * CHUNK_BYTES + 1))}, "bytes up to 20481 of s3://models/m/0"),
        ({"needs": spans_of((0, 1 << 60))}, "bytes up to"),
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with ranks(OBJECTS, [ALL] * 2) as made:
        peers = made[1].exchange._peers
        tell = peers.tell

        def lie(word: Word, payload: bytes = b"", fd: int | None = None) -> None:
            if word is Word.NEEDS:
                payload = dataclasses.replace(Told.decode(payload), **changes).encode()
            tell(word, payload, fd)

        peers.tell = lie  # type: ignore[method-assign]
        run_all(made)
        assert isinstance(made[0].error, PeerError)
        assert "rank 1" in str(made[0].error)
        assert told in str(made[0].error)


def test_what_cannot_be_divided_is_not_taken_for_the_models_fault() -> None:
    with ranks(OBJECTS, [ALL] * 2) as made:
        with_terms(made[0], chunk_bytes=63)
        run_all(made)
        assert all(isinstance(row.error, FastloadError) for row in made)
        with pytest.raises(FastloadError, match="could not be divided"):
            divide([], [Told(63, 0, False, b"", b"", b"", b"")], by_object=False)


def test_copies_in_other_places_are_read_alone_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies = {ObjectId(f"{one.uri}-copy", '"c"', one.size_bytes): OBJECTS[one] for one in IDS}
    with ranks(OBJECTS, [ALL] * 3) as made, caplog.at_level(logging.WARNING):
        made[2].needs = [(one, 0, one.size_bytes) for one in copies]
        made[2].fetch = MemoryFetch(copies, made[2].arena)
        with_terms(made[2], objects=tuple(copies), fetch=made[2].fetch, abort=made[2].fetch.abort)
        run_all(made)
        all_is_right(made, OBJECTS | copies)
        total = sum(map(len, OBJECTS.values()))
        assert [row.exchange.fetched_bytes for row in made] == [total] * 3
        assert [row.exchange.received_bytes for row in made] == [0] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "the 3 ranks of this host read alone, what several of them need more than once: "
        "rank 2 loads from other places than rank 0"
    ]


def test_objects_that_nobody_needs_are_compared_by_those_who_share_and_verify() -> None:
    left_out: dict[int, frozenset[ObjectId]] = {}

    def loads(row: Rank) -> None:
        row.load()
        left_out[row.exchange._peers.rank] = row.exchange.objects_of_others()

    def reads_alone(row: Rank) -> None:
        row.exchange.read_alone()

    few = [(IDS[0], 0, 100)]
    with ranks(OBJECTS, [few] * 4, by_object=True) as made:
        with_terms(made[1], by_object=False)
        run_all(made, [loads, loads, reads_alone, loads])
        assert [row.error for row in made] == [None] * 4
    compared = [one for rank in (0, 3) for one in IDS if one not in left_out[rank]]
    assert sorted(one.uri for one in compared if one != IDS[0]) == [IDS[1].uri, IDS[2].uri]
