"""What a rank brings into the exchange: its memory, its objects, its limits, its way to fetch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fastload_common.exchange.slots import Filled
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ObjectId

__all__ = ["Fetch", "Terms", "digest_of"]

Fetch = Callable[[Iterable[Chunk]], Iterator[Filled]]
"""Fetches into this rank's own memory; called once, from another thread."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The part of one rank.

    Attributes:
        arena_fd, arena_bytes: its staging memory; the descriptor stays the caller's.
        objects: all objects that hold tensors, in an order that is the same on all ranks.
        chunk_bytes: what a slot holds, rounded down to the planner's alignment.
        gap_bytes: gaps up to this long are read over.
        by_object: each object must be fetched by one rank, so that it can be compared as a whole.
        headers: digest of what the headers say, where that is to be compared; else empty.
        fetch: brings this rank's own chunks.
        abort: makes that end at once.
    """

    arena_fd: int
    arena_bytes: int
    objects: tuple[ObjectId, ...]
    chunk_bytes: int
    gap_bytes: int
    by_object: bool
    headers: bytes
    fetch: Fetch
    abort: Callable[[], None]


def digest_of(rows: Iterable[object]) -> bytes:
    """A digest of plain records, by their text."""
    digest = hashlib.sha256()
    for row in rows:
        text = repr(row).encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()
