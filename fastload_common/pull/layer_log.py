"""What an unpacked layer cannot hold as files: whiteouts, late links, directories' own state.

Kept in a file beside the layer, in the order of the archive, since there may be millions of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from fastload_common.errors import PullError
from fastload_common.pull.safe_tree import Parts

__all__ = ["LogWriter", "Note", "Record", "read_log"]

_HEAD = struct.Struct("<BHIIqIII")
_PIECE_BYTES = 1 << 18


class Note(IntEnum):
    """What a record says."""

    DIRECTORY = 1
    """A directory with its own mode, owner and time."""
    IMPLICIT = 2
    """A directory that no entry stands for."""
    WHITEOUT = 3
    """The path must go from the layers below."""
    OPAQUE = 4
    """All that the layers below have in this directory must go."""
    LATE_LINK = 5
    """A hard link whose target the layer itself does not have."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a log; what a note does not use is 0 or empty."""

    note: Note
    path: Parts
    target: Parts = ()
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


class LogWriter:
    """Writes records; the caller closes the stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def add(self, record: Record) -> None:
        """Append one."""
        path, target = b"/".join(record.path), b"/".join(record.target)
        xattrs = b"".join(
            struct.pack("<II", len(name), len(value)) + name + value
            for name, value in record.xattrs
        )
        head = _HEAD.pack(
            record.note,
            record.mode,
            record.uid,
            record.gid,
            record.mtime_ns,
            len(path),
            len(target),
            len(xattrs),
        )
        self._stream.write(head + path + target + xattrs)


def read_log(path: Path) -> Iterator[Record]:
    """The records of a log that was closed.

    Raises:
        PullError: it was cut off.
    """
    with open(path, "rb", buffering=_PIECE_BYTES) as stream:
        while head := stream.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise _cut_off(path)
            note, mode, uid, gid, mtime_ns, *lengths = _HEAD.unpack(head)
            body = stream.read(sum(lengths))
            if len(body) < sum(lengths):
                raise _cut_off(path)
            end = lengths[0] + lengths[1]
            yield Record(
                Note(note),
                _parts(body[: lengths[0]]),
                _parts(body[lengths[0] : end]),
                mode,
                uid,
                gid,
                mtime_ns,
                tuple(_xattrs(body[end:])),
            )


def _parts(data: bytes) -> Parts:
    return tuple(data.split(b"/")) if data else ()


def _xattrs(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(data):
        name_bytes, value_bytes = struct.unpack_from("<II", data, at)
        at += 8
        value_at = at + name_bytes
        yield data[at:value_at], data[value_at : value_at + value_bytes]
        at = value_at + value_bytes


def _cut_off(path: Path) -> PullError:
    return PullError(
        f"{path} is cut off: the disk was full, or somebody changed it",
        hint="remove the directory that it is in, and pull again",
    )
