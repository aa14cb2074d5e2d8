"""Compare what a load read with the CRCs that the store keeps of whole objects (FASTLOAD_VERIFY).

Every byte that is used counts: headers and the index as they are parsed, chunks in their staging
slots just before they are placed. What is read twice is compared twice. A mismatch is raised as
soon as an object is complete, and once more at the end, where somebody caught it.

With ``off`` nothing here runs: the fetch that `Verification.watch` returns is the one it was given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

from fastload_common.errors import ChecksumMismatchError
from fastload_common.load.executor import Fetch, FilledChunk, ended
from fastload_common.load.report import LoadReport
from fastload_common.load.verify_object import CheckedObject, checked_object
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ObjectId
from fastload_common.source.base import ObjectSource, TellsSenders

__all__ = ["SeeStart", "Verification"]

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=FilledChunk)

SeeStart = Callable[[ObjectId, bytes], None]
"""Told the first bytes of an object that were used outside the transfer."""


class Verification:
    """The check of one load. Objects may be opened from any thread; everything else is for one.

    Args:
        mode: the setting `verify`.
        report: its `verified` is filled by `finish`.
    """

    def __init__(self, mode: str, report: LoadReport) -> None:
        self._mode = mode
        self._chunk_bytes = 0
        self._report = report
        self._objects: dict[ObjectId, CheckedObject | None] = {}
        self._sources: dict[ObjectId, object] = {}
        self._fetch: Fetch | None = None
        self._read_bytes = 0
        self._finished = False
        self._left_out: frozenset[ObjectId] = frozenset()
        self._failure: ChecksumMismatchError | None = None

    @property
    def is_on(self) -> bool:
        return self._mode != "off"

    def starts(self, source: ObjectSource) -> SeeStart | None:
        """What is to be told the starts of a source's objects as they are parsed; None if off.

        It asks for the object's stored checksum, so it may take as long as a small request.

        Raises (when told):
            ConfigError: the algorithm needs a package that is not installed.
            SourceError: the store does not answer.
            ChecksumMismatchError: as always.
        """
        if not self.is_on:
            return None

        def see(object_id: ObjectId, data: bytes) -> None:
            if object_id not in self._objects:
                stored = source.stored_checksum(object_id)
                everything = self._mode == "full"
                self._objects[object_id] = checked_object(object_id, stored, everything=everything)
                self._sources[object_id] = source
            self._see(object_id, 0, memoryview(data))

        return see

    def watch(
        self, fetch: Callable[[Iterable[Chunk]], Iterator[_F]], chunk_bytes: int
    ) -> Callable[[Iterable[Chunk]], Iterator[_F]]:
        """The same fetch, whose chunks are looked at before the caller gets them.

        Args:
            chunk_bytes: what a staging slot holds; larger chunks are not asked for.
        """
        if not self.is_on:
            return fetch
        self._fetch, self._chunk_bytes = fetch, chunk_bytes

        def watched(chunks: Iterable[Chunk]) -> Iterator[_F]:
            return self._watched(fetch(chunks))

        return watched

    def leave_out(self, objects: frozenset[ObjectId]) -> None:
        """Neither read on nor count these: another rank of this host fetches and compares them."""
        self._left_out = objects

    def finish(self) -> None:
        """Read what must still be read, and compare. To be called before the model is used.

        Raises:
            ChecksumMismatchError: an object is not what was stored; also if that was raised before.
            SourceError: what is read only to be compared could not be read.
        """
        if not self.is_on:
            return
        try:
            if self._failure is not None:
                raise self._failure
            with self._report.phase("verify"):
                self._read_rest()
        finally:
            self._count()
        if not self._finished:
            self._tell()
        self._finished = True

    def _watched(self, filling: Iterator[_F]) -> Generator[_F, None, None]:
        with ended(filling):
            for filled in filling:
                try:
                    with self._report.phase("verify"):
                        self._see_chunk(filled)
                except BaseException:
                    filled.release()
                    raise
                yield filled

    def _see_chunk(self, filled: FilledChunk) -> None:
        chunk = filled.chunk
        self._see(chunk.object_id, chunk.byte_range.start, filled.data)

    def _see(self, object_id: ObjectId, start: int, data: memoryview) -> None:
        seen = self._objects.get(object_id)
        if seen is None:
            return
        try:
            seen.see(start, data)
        except ChecksumMismatchError as error:
            source = self._sources.get(object_id)
            if isinstance(source, TellsSenders) and (senders := source.senders(object_id)):
                error.fields["endpoint"] = senders
            # Whoever computes with these bytes may catch everything.
            self._failure = error
            self._count()
            raise

    def _read_rest(self) -> None:
        while chunks := [
            Chunk(seen.object_id, byte_range, 0)
            for seen in self._known()
            for wanted in seen.wanted(everything=self._mode == "full")
            for byte_range in wanted.pieces(self._chunk_bytes)
        ]:
            assert self._fetch is not None
            filling = self._fetch(chunks)
            with ended(filling):
                for filled in filling:
                    try:
                        self._see_chunk(filled)
                    finally:
                        filled.release()
                    self._read_bytes += filled.chunk.byte_range.size_bytes

    def _own(self) -> dict[ObjectId, CheckedObject | None]:
        """The objects that are not left to others."""
        return {one: seen for one, seen in self._objects.items() if one not in self._left_out}

    def _known(self) -> list[CheckedObject]:
        return [seen for seen in self._own().values() if seen is not None]

    def _count(self) -> None:
        compared = sum(seen.is_compared for seen in self._known())
        self._report.verified = {
            "mode": self._mode,
            "compared": compared,
            "without_checksum": len(self._own()) - len(self._known()),
            "partly_read": len(self._known()) - compared,
            "read_bytes": self._read_bytes,
        }

    def _tell(self) -> None:
        without = [object_id.uri for object_id, seen in self._own().items() if seen is None]
        if without:
            logger.warning(
                "FASTLOAD_VERIFY: %d of %d objects have no stored checksum of the whole object and "
                "were not compared, such as %s",
                len(without),
                len(self._own()),
                without[0],
            )
