"""The journal of one cached object: which ranges of its data file are good, with their CRCs. Pure.

A journal is a row of frames, each written by one append and checked as a whole. What is torn or
damaged is passed over, and reading goes on at the next frame. Order counts: a later record of the
same range replaces an earlier one, and a record without a checksum takes back what came before it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fastload_common.checksums.algorithms import CRC32, CRC64NVME, Algorithm
from fastload_common.ranges import ByteRange
from fastload_common.units import MIB

__all__ = ["ALGORITHMS", "BLOCK_BYTES", "Piece", "forgotten", "pack", "unpack"]

BLOCK_BYTES = 1 * MIB
"""No piece reaches over a multiple of this, so that a part of any range costs little to check."""

ALGORITHMS: dict[int, Algorithm] = {1: CRC64NVME, 2: CRC32}
"""By their number in records. 0 stands for: what was recorded here before is not good."""

_MAGIC = b"flRngJ01"
_HEAD = struct.Struct("<8sII")  # magic, records, CRC32 of the key and the records
_ROW = np.dtype([("start", "<u8"), ("size", "<u4"), ("algorithm", "<u4"), ("value", "<u8")])
_MOST_ROWS = 1 << 16


class Piece(NamedTuple):
    """One range with its checksum.

    Attributes:
        start, end: in the object; within one block.
        algorithm: number in `ALGORITHMS`, or 0.
        value: the CRC.
    """

    start: int
    end: int
    algorithm: int
    value: int


def forgotten(byte_range: ByteRange) -> list[Piece]:
    """The records that take back what is recorded of a range."""
    return [
        Piece(start, min(start + BLOCK_BYTES, byte_range.end), 0, 0)
        for start in range(byte_range.start, byte_range.end, BLOCK_BYTES)
    ]


def pack(key: str, pieces: Sequence[Piece]) -> bytes:
    """Frames for pieces.

    Args:
        key: of the object: in the journal of another one the frames count for nothing.
    """
    frames = []
    for first in range(0, len(pieces), _MOST_ROWS):
        some = pieces[first : first + _MOST_ROWS]
        rows = np.array([(p.start, p.end - p.start, p.algorithm, p.value) for p in some], _ROW)
        body = rows.tobytes()
        frames.append(_HEAD.pack(_MAGIC, len(some), _check(key, body)) + body)
    return b"".join(frames)


def unpack(key: str, data: bytes, size_bytes: int) -> tuple[list[Piece], int]:
    """All good records in order, and where the last good frame ends.

    Args:
        size_bytes: of the object; records beyond it count for nothing.
    """
    found: list[Piece] = []
    at = end = 0
    while (at := data.find(_MAGIC, at)) >= 0:
        body = _body(key, data, at)
        if body is None:
            at += 1
            continue
        found += _pieces(body, size_bytes)
        at = end = at + _HEAD.size + len(body)
    return found, end


def _check(key: str, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(key.encode()))


def _body(key: str, data: bytes, at: int) -> bytes | None:
    if at + _HEAD.size > len(data):
        return None
    _, count, check = _HEAD.unpack_from(data, at)
    first = at + _HEAD.size
    body = data[first : first + count * _ROW.itemsize] if count <= _MOST_ROWS else b""
    return (
        body if body and len(body) == count * _ROW.itemsize and _check(key, body) == check else None
    )


def _pieces(body: bytes, size_bytes: int) -> Iterable[Piece]:
    rows = np.frombuffer(body, _ROW)
    columns = (rows[name].tolist() for name in ("start", "size", "algorithm", "value"))
    for start, size, algorithm, value in zip(*columns, strict=True):
        end = start + size
        is_sane = 0 < size <= BLOCK_BYTES and end <= size_bytes
        if is_sane and (not algorithm or start // BLOCK_BYTES == (end - 1) // BLOCK_BYTES):
            yield Piece(start, end, algorithm, value)
