"""Looks at a cache from outside of a load: what is in it, and whether that is as recorded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastload_common.range_cache.coverage import Held
from fastload_common.range_cache.entry import FACTS, Entry, Identity
from fastload_common.range_cache.own_files import OddFileError, read_own
from fastload_common.range_cache.place import CacheDirectory, Row
from fastload_common.range_cache.records import BLOCK_BYTES, Piece
from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["Known", "check", "known"]

# Keys of objects have 1 KiB at most.
_MOST_FACTS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Known:
    """One entry.

    Attributes:
        identity: None where nobody wrote down what it is.
        held_bytes: of the object.
    """

    row: Row
    identity: Identity | None
    held_bytes: int


def known(directory: CacheDirectory) -> Iterator[Known]:
    """All entries, the least recently used first.

    Raises:
        OSError: the disk fails.
    """
    for row in directory.rows():
        identity = _identity(directory.path / (row.key + FACTS))
        held_bytes = 0
        if identity is not None and identity.key == row.key:
            entry = Entry(directory.path, identity, writable=False)
            with contextlib.closing(entry), contextlib.suppress(OddFileError):
                if entry.open():
                    held_bytes = entry.coverage.held_bytes
        yield Known(row, identity, held_bytes)


def check(directory: CacheDirectory, identity: Identity) -> tuple[int, int]:
    """Read all that is held of an object: the bytes that are good, and those that are damaged.

    What is damaged is forgotten, where that may be written down.

    Raises:
        OddFileError: one of its files is not what it must be.
        OSError: the disk fails.
    """
    entry = Entry(directory.path, identity, writable=not directory.why_not_writable)
    memory = memoryview(bytearray(BLOCK_BYTES))
    good = 0
    bad: list[Piece] = []
    try:
        for piece in entry.coverage.pieces if entry.open() else ():
            wanted = ByteRange(piece.start, piece.end)
            if entry.read(Held((piece,), wanted), memory[: wanted.size_bytes], wanted.start):
                bad.append(piece)
            else:
                good += wanted.size_bytes
        if bad:
            entry.forget(bad)
    finally:
        entry.close()
    return good, sum(piece.end - piece.start for piece in bad)


def _identity(path: Path) -> Identity | None:
    try:
        facts = json.loads(read_own(path, _MOST_FACTS_BYTES))
        uri, etag, size_bytes = facts["uri"], facts["etag"], facts["size_bytes"]
        return Identity(str(facts["scope"]), ObjectId(str(uri), str(etag), int(size_bytes)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
