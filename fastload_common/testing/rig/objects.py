"""The rig's objects: bytes that are held, or generated as they are sent, and their checksums."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Protocol

__all__ = ["CHECKSUMS", "Content", "Generated", "Held", "StoredObject", "checksum", "etag_of"]

# No power of two and a prime: what lies one chunk further never looks the same.
_BLOCK_BYTES = 8_388_593


class Content(Protocol):
    """The bytes of an object."""

    @property
    def size_bytes(self) -> int: ...

    def pieces(self, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
        """The bytes ``[start, end)`` in pieces of at most ``piece_bytes``."""
        ...


class Held:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size_bytes = len(data)

    def pieces(self, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
        for at in range(start, end, piece_bytes):
            yield self._data[at : min(at + piece_bytes, end)]


class Generated:
    """Any number of bytes that a size and a seed determine; takes 8 MiB whatever the size."""

    def __init__(self, size_bytes: int, seed: int = 0) -> None:
        self.size_bytes = size_bytes
        self.seed = seed
        self._block = memoryview(_block(min(size_bytes, _BLOCK_BYTES), seed))

    def pieces(self, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
        at = start
        while at < end:
            offset = at % _BLOCK_BYTES
            piece = self._block[offset : offset + min(piece_bytes, end - at)]
            yield piece
            at += len(piece)

    def read(self, start: int = 0, end: int | None = None) -> bytes:
        """The bytes ``[start, end)``, for a test to compare with."""
        end = self.size_bytes if end is None else end
        return b"".join(self.pieces(start, end, _BLOCK_BYTES))


@cache
def _block(size_bytes: int, seed: int) -> bytes:
    return Random(seed).randbytes(size_bytes)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One state of one object.

    Attributes:
        etag: with its quotes.
        checksums: algorithm to the base64 text that S3 would show; of the full object.
        version: its id, in a bucket that keeps versions.
    """

    content: Content
    etag: str
    checksums: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None

    @property
    def size_bytes(self) -> int:
        return self.content.size_bytes

    def version_header(self) -> dict[str, str]:
        return {} if self.version is None else {"x-amz-version-id": self.version}


def etag_of(data: bytes) -> str:
    """What S3 calls an object that was put in one part."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@cache
def _table(polynomial: int) -> tuple[int, ...]:
    """Of a reflected CRC."""
    found = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        found.append(value)
    return tuple(found)


def _crc(data: bytes, polynomial: int, width: int) -> int:
    """A reflected CRC that begins and ends inverted. Slow: for small objects."""
    table, ones = _table(polynomial), (1 << width) - 1
    value = ones
    for byte in data:
        value = (value >> 8) ^ table[(value ^ byte) & 0xFF]
    return value ^ ones


def _crc32(data: bytes) -> tuple[int, int]:
    return zlib.crc32(data), 4


def _crc32c(data: bytes) -> tuple[int, int]:
    return _crc(data, 0x82F63B78, 32), 4


def _crc64nvme(data: bytes) -> tuple[int, int]:
    return _crc(data, 0x9A6C9329AC4BC9B5, 64), 8


CHECKSUMS = {"crc64nvme": _crc64nvme, "crc32c": _crc32c, "crc32": _crc32}


def checksum(algorithm: str, data: bytes) -> str:
    """The base64 text of S3's checksum headers. ``algorithm`` is one of `CHECKSUMS`."""
    value, width_bytes = CHECKSUMS[algorithm](data)
    return base64.b64encode(value.to_bytes(width_bytes, "big")).decode()
