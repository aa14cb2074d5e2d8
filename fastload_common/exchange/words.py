"""What ranks say to each other once they have met: the frames' kinds and what is in them.

ARENA    size of the staging memory; its descriptor comes with it
NEEDS    what this rank needs, and on which terms; once, after its trace (`Told`)
FILLED   a chunk lies in the sender's memory, at a position
TAKEN    the sender has copied what it needs of a chunk
DONE     the sender needs nothing more of anybody
FAILED   the load of the sender has ended, and why (`Failure`)
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum

from fastload_common.errors import FastloadError, PeerError

__all__ = ["ARENA_FORM", "FILLED_FORM", "TAKEN_FORM", "Failure", "Told", "Word"]

ARENA_FORM = struct.Struct("=Q")  # bytes
FILLED_FORM = struct.Struct("=IQ")  # number in the plan, position in the memory
TAKEN_FORM = struct.Struct("=I")  # number in the plan

_TOLD_HEAD = struct.Struct("=QQ?32s32s32s")
_DIGEST_BYTES = 32
_MOST_TEXT = 8192
_MOST_KIND = 100


class Word(IntEnum):
    """The kind of a frame."""

    ARENA = 1
    NEEDS = 2
    FILLED = 3
    TAKEN = 4
    DONE = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells after its trace.

    Attributes:
        chunk_bytes: the most that its slots hold.
        gap_bytes: gaps up to this long it would read over.
        by_object: whether it wants each object to be fetched by one rank.
        objects: digest of the objects that it found; `NOTHING` where it did not look.
        headers: digest of what it read in their headers; `NOTHING` where it did not look.
        uris: digest of the objects' URIs alone, which differ where copies are loaded.
        needs: encoded `fastload_common.plan.needs.Needs`; empty: it reads alone.
    """

    chunk_bytes: int
    gap_bytes: int
    by_object: bool
    objects: bytes
    headers: bytes
    uris: bytes
    needs: bytes

    NOTHING = bytes(_DIGEST_BYTES)

    def encode(self) -> bytes:
        digests = (self.objects, self.headers, self.uris)
        head = _TOLD_HEAD.pack(self.chunk_bytes, self.gap_bytes, self.by_object, *digests)
        return head + self.needs

    @classmethod
    def decode(cls, data: bytes) -> Told:
        """Raises ValueError for what is too short."""
        if len(data) < _TOLD_HEAD.size:
            raise ValueError("needs without their head")
        chunk_bytes, gap_bytes, by_object, *digests = _TOLD_HEAD.unpack_from(data)
        objects, headers, uris = digests
        needs = data[_TOLD_HEAD.size :]
        return cls(chunk_bytes, gap_bytes, by_object, objects, headers, uris, needs)


@dataclass(frozen=True, slots=True)
class Failure:
    """How the load of one rank ended. Its words are cut and escaped: they go to logs.

    Attributes:
        rank, pid: whose load it was that failed first.
        kind: the error's type; empty where it ended without a word.
        text: its message, where that is ours to vouch for; a foreign one may hold a secret.
    """

    rank: int
    pid: int
    kind: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _plain(self.kind, _MOST_KIND))
        object.__setattr__(self, "text", _plain(self.text, _MOST_TEXT))

    @classmethod
    def of(cls, rank: int, pid: int, error: BaseException) -> Failure:
        """What is told of an error; of another rank's, what that one told."""
        if isinstance(error, PeerError):
            told = getattr(error, "failure", None)
            if isinstance(told, cls):
                return told
        text = str(error) if isinstance(error, FastloadError) else ""
        return cls(rank, pid, type(error).__name__, text)

    def error(self) -> PeerError:
        """What a rank raises that was told."""
        who = f"rank {self.rank} (pid {self.pid})"
        if self.kind:
            told = self.kind + (f": {self.text}" if self.text else "")
            error = PeerError(
                f"{who}, which loads together with this one, failed: {told}",
                hint="the error is that rank's; its own log says more",
            )
        else:
            error = PeerError(
                f"{who}, which loads together with this one, ended without a word (killed?)",
                hint="see that process's end in its log and in the kernel's (out of memory?)",
            )
        error.failure = self
        return error

    def encode(self) -> bytes:
        return json.dumps([self.rank, self.pid, self.kind, self.text]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        """Raises ValueError for what is none."""
        fields = json.loads(data)
        if not isinstance(fields, list) or [type(f) for f in fields] != [int, int, str, str]:
            raise ValueError("a failure that says nothing")
        return cls(*fields)


def _plain(text: str, most: int) -> str:
    """A text of another process, fit for a line of a log."""
    text = text[:most]
    if text.isprintable():
        return text
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)[:most]
