"""One object with what was seen of it, compared with what its store says of the whole.

With a CRC the ranges may come in any order. A registry keeps a digest, which needs them in theirs:
such an object is read once more, from its start to its end, and what was used is compared with
that reading by its CRCs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastload_common.checksums.algorithms import CRC32, Checksum, crc_function
from fastload_common.checksums.composed import Composed, ContradictionError
from fastload_common.errors import ChecksumMismatchError
from fastload_common.plan.planner import ALIGNMENT_BYTES
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.oci_reference import hasher, is_digest
from fastload_common.units import MIB

__all__ = ["CheckedObject", "DigestedObject", "checked_object"]

_HINT = (
    "load again; if it happens again, compare the object with its original: it was damaged after "
    "its upload, or a proxy, a network card or this machine's memory damages data"
)

# What comes before its turn waits, up to here; the rest is asked for again.
_MOST_WAITING_BYTES = 64 * MIB


def checked_object(
    object_id: ObjectId, stored: Checksum | None, *, everything: bool
) -> CheckedObject | None:
    """What an object is compared by; None: by nothing.

    Args:
        stored: the CRC that its store keeps.
        everything: whether objects are read only to be compared.

    Raises:
        ConfigError: the algorithm needs a package that is not installed.
    """
    if stored is not None:
        return CheckedObject(object_id, stored)
    if everything and is_digest(object_id.etag or ""):
        return DigestedObject(object_id, Checksum(CRC32, 0))
    return None


@dataclass(slots=True)
class CheckedObject:
    """One object with what was seen of it."""

    object_id: ObjectId
    stored: Checksum
    is_compared: bool = False
    composed: Composed = field(init=False)
    crc: Callable[[memoryview], int] = field(init=False)

    def __post_init__(self) -> None:
        algorithm = self.stored.algorithm
        self.crc = crc_function(algorithm)
        self.composed = Composed(algorithm, ByteRange(0, self.object_id.size_bytes))

    def see(self, start: int, data: memoryview) -> None:
        """Take a range that is used; compare once all is there.

        Raises:
            ChecksumMismatchError: it is not what was stored, or not what was read before.
        """
        end = start + len(data)
        # The planner's chunks begin up to here before the bytes that they are for, so the next
        # one may begin in this one: then it comes again as exactly this piece.
        border = max(start, end - end % ALIGNMENT_BYTES)
        for byte_range in (ByteRange(start, border), ByteRange(border, end)):
            for part in self.composed.cut(byte_range):
                value = self.crc(data[part.start - start : part.end - start])
                try:
                    self.composed.add(part, value)
                except ContradictionError as error:
                    raise self._contradiction(error) from None
        if self.composed.is_complete and not self.is_compared:
            self._compare()

    def wanted(self, *, everything: bool) -> list[ByteRange]:
        """What must be read only to be compared."""
        if everything or self.composed.is_complete:
            return self.composed.missing() + self.composed.uncompared()
        return []

    def _compare(self) -> None:
        algorithm = self.stored.algorithm
        value = self.composed.value()
        if value != self.stored.value:
            raise ChecksumMismatchError(
                f"{self.object_id.uri} is not what was stored: its {algorithm.name} checksum is "
                f"{self.stored}, that of the bytes that arrived is {algorithm.show(value)}",
                hint=_HINT,
                uri=self.object_id.uri,
                algorithm=algorithm.name,
                expected=str(self.stored),
                computed=algorithm.show(value),
                etag=self.object_id.etag,
            )
        self.is_compared = True

    def _contradiction(self, error: ContradictionError) -> ChecksumMismatchError:
        algorithm = self.stored.algorithm
        return ChecksumMismatchError(
            f"{self.object_id.uri} was read twice and differs: {algorithm.name} of bytes "
            f"{error.byte_range} is {algorithm.show(error.first)} and "
            f"{algorithm.show(error.again)}",
            hint=_HINT,
            uri=self.object_id.uri,
            algorithm=algorithm.name,
            range=str(error.byte_range),
            expected=algorithm.show(error.first),
            computed=algorithm.show(error.again),
            etag=self.object_id.etag,
        )


@dataclass(slots=True)
class DigestedObject(CheckedObject):
    """An object whose state is its digest: a whole layer of a registry."""

    hashed_bytes: int = 0
    hash: Any = field(init=False, repr=False)
    waiting: dict[int, bytes] = field(default_factory=dict, repr=False)
    is_read_again: bool = False

    def __post_init__(self) -> None:
        super(DigestedObject, self).__post_init__()
        self.hash = hasher(self.object_id.etag or "")

    def see(self, start: int, data: memoryview) -> None:
        """See `CheckedObject.see`."""
        super(DigestedObject, self).see(start, data)
        if start <= self.hashed_bytes:
            self._update(start, data)
        elif self.is_read_again:
            waiting_bytes = sum(map(len, self.waiting.values()))
            if waiting_bytes + len(data) <= _MOST_WAITING_BYTES:
                self.waiting[start] = bytes(data)
        if self.hashed_bytes == self.object_id.size_bytes and not self.is_compared:
            self._compare_digest()

    def wanted(self, *, everything: bool) -> list[ByteRange]:
        """See `CheckedObject.wanted`: the rest, in order."""
        self.is_read_again = True
        if self.hashed_bytes == self.object_id.size_bytes:
            return self.composed.uncompared()
        return [ByteRange(self.hashed_bytes, self.object_id.size_bytes)]

    def _update(self, start: int, data: memoryview | bytes) -> None:
        self._hash(start, data)
        for first in sorted(self.waiting):
            if first > self.hashed_bytes:
                break
            self._hash(first, self.waiting.pop(first))

    def _hash(self, start: int, data: memoryview | bytes) -> None:
        end = start + len(data)
        if end > self.hashed_bytes:
            self.hash.update(data[self.hashed_bytes - start :])
            self.hashed_bytes = end

    def _compare(self) -> None:
        """By its digest, once it was read in order."""

    def _compare_digest(self) -> None:
        expected = self.object_id.etag or ""
        computed = f"{expected.partition(':')[0]}:{self.hash.hexdigest()}"
        if computed != expected:
            raise ChecksumMismatchError(
                f"{self.object_id.uri} is not what its digest says: {expected}, that of the bytes "
                f"that arrived is {computed}",
                hint=_HINT,
                uri=self.object_id.uri,
                algorithm=expected.partition(":")[0],
                expected=expected,
                computed=computed,
            )
        self.is_compared = True
