"""What a client is to do and what it must have received: plain data, for one process to another."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from fastload_common.units import MIB

__all__ = ["BUCKET", "Item", "Piece", "Work", "check", "objects_of", "word_at"]

BUCKET = "bucket"

# These three are those of native/content.h.
HEADER_BYTES = 64 * 1024
_PERIOD_BYTES = 257 * MIB + 4096
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Item:
    """One object of the store."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of an object."""

    name: str
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement.

    Attributes:
        client: name of a module in `benchmarks.clients`.
        items: the objects to receive, whole.
        chunk_bytes, connections: how, for clients that can be told; 0: as the client's defaults
            are.
        warm: an object to receive beforehand, several times, so that connections are open,
            libraries loaded and memory touched; None: a cold start.
        busy_thread: a Python thread of the client's process computes all the while.
        options: further settings of the client.
    """

    client: str
    items: tuple[Item, ...]
    chunk_bytes: int
    connections: int
    warm: Item | None = None
    busy_thread: bool = False
    options: dict[str, Any] | None = None

    @property
    def total_bytes(self) -> int:
        return sum(item.size_bytes for item in self.items)

    def pieces(self, items: tuple[Item, ...]) -> list[Piece]:
        """Chunks of the objects, in order."""
        return [
            Piece(item.name, start, min(self.chunk_bytes, item.size_bytes - start))
            for item in items
            for start in range(0, item.size_bytes, self.chunk_bytes)
        ]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        values = json.loads(text)
        values["items"] = tuple(Item(**item) for item in values["items"])
        values["warm"] = values["warm"] and Item(**values["warm"])
        return cls(**values)


def objects_of(count: int, size_bytes: int) -> tuple[Item, ...]:
    """Names as a checkpoint's shards have them."""
    return tuple(
        Item(f"model-{number:05}-of-{count:05}.safetensors", size_bytes)
        for number in range(1, count + 1)
    )


def word_at(offset: int) -> bytes:
    """The 8 bytes that stand at an offset behind the header, a multiple of 8, of every object."""
    return struct.pack("<Q", offset % _PERIOD_BYTES // 8 * _GOLDEN % 2**64)


def check(data: bytes | bytearray | memoryview, offset: int) -> None:
    """Compare the first and the last word of what was received from this offset of an object.

    Offset and size are multiples of 8.
    """
    for place in (0, len(data) - 8):
        if offset + place < HEADER_BYTES:
            continue
        if bytes(data[place : place + 8]) != word_at(offset + place):
            raise AssertionError(f"wrong bytes at {offset + place}")
