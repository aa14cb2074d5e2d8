"""Brings the bytes of a pull into its spools: many ranges at once, or one stream for each blob."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import RangeMismatchError
from fastload_common.plan.records import Chunk
from fastload_common.pull.sizes import PullSizes
from fastload_common.pull.spool import Spool
from fastload_common.pull.streaming import stream_all
from fastload_common.ranges import ObjectId
from fastload_common.source.base import OpensReceivers, RemoteSource
from fastload_common.staging.arena import Arena
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.stats import TransferStats

__all__ = ["Download"]

logger = logging.getLogger(__name__)

# Chunks are records of some hundred bytes, and there may be millions of them.
_BATCH_CHUNKS = 8192


class Download:
    """All of one pull.

    Args:
        source: of the objects; not closed here.
        wanted: the objects and their spools, those whose unpacking takes longest first.
        width: of how many of them ranges are asked for at the same time.
        advance: told how many bytes have come.

    Attributes:
        fetched_bytes: that have come.
        streamed: blobs that came as one stream.
    """

    def __init__(
        self,
        source: OpensReceivers,
        wanted: Sequence[tuple[ObjectId, Spool]],
        sizes: PullSizes,
        settings: Settings,
        clock: Clock,
        stats: TransferStats,
        *,
        width: int,
        started_s: float,
        advance: Callable[[int], None],
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._sizes = sizes
        self._settings = settings
        self._clock = clock
        self._stats = stats
        self._width = width
        self._started_s = started_s
        self._advance = advance
        self._stopped = threading.Event()
        self._fetcher: Fetcher | None = None
        self.fetched_bytes = 0
        self.streamed = 0

    def stop(self) -> None:
        """End `run` as soon as may be. For any thread."""
        self._stopped.set()
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.close()

    def run(self) -> None:
        """Fetch what is missing.

        Raises:
            SourceError, DeadlineError: see `Fetcher.fetch`.
            OSError: the disk is full, or the like.
        """
        try:
            self._fetch_ranges()
        except RangeMismatchError as error:
            if self._stopped.is_set():
                return
            if not isinstance(self._source, RemoteSource):
                raise
            logger.warning(
                "the store does not serve ranges (%s); each blob is fetched as one stream",
                error.what,
            )
            self._fetch_streams()
        except BaseException:
            if not self._stopped.is_set():
                raise

    def _fetch_ranges(self) -> None:
        spools = dict(self._wanted)
        chunks = self._chunks()
        sizes = self._sizes
        with (
            contextlib.closing(Arena(sizes.slot_bytes, sizes.slots)) as arena,
            Fetcher(
                self._source,
                arena,
                sizes.policy(self._settings),
                self._clock,
                self._stats,
                started_s=self._started_s,
            ) as fetcher,
        ):
            self._fetcher = fetcher
            while not self._stopped.is_set() and (
                batch := list(itertools.islice(chunks, _BATCH_CHUNKS))
            ):
                with contextlib.closing(fetcher.fetch(batch)) as filling:
                    for filled in filling:
                        try:
                            object_id = filled.chunk.object_id
                            spools[object_id].write(filled.chunk.byte_range.start, filled.data)
                        finally:
                            filled.release()
                        self._count(filled.chunk.byte_range.size_bytes)

    def _fetch_streams(self) -> None:
        assert isinstance(self._source, RemoteSource)
        wanted = [(one, spool) for one, spool in self._wanted if not spool.is_complete]
        self.streamed = len(wanted)
        stream_all(
            self._source,
            wanted,
            self._settings,
            self._clock,
            self._stopped,
            threads=min(self._sizes.connections, len(wanted)),
            advance=self._count,
        )

    def _count(self, size_bytes: int) -> None:
        self.fetched_bytes += size_bytes
        self._advance(size_bytes)

    def _chunks(self) -> Iterator[Chunk]:
        """What is missing, of some objects by turns."""
        waiting = deque(self._wanted)
        turns: deque[Iterator[Chunk]] = deque()
        while waiting or turns:
            while waiting and len(turns) < self._width:
                turns.append(self._chunks_of(*waiting.popleft()))
            turn = turns.popleft()
            chunk = next(turn, None)
            if chunk is not None:
                turns.append(turn)
                yield chunk

    def _chunks_of(self, object_id: ObjectId, spool: Spool) -> Iterator[Chunk]:
        for missing in spool.missing():
            for byte_range in missing.pieces(self._sizes.slot_bytes):
                yield Chunk(object_id, byte_range, byte_range.size_bytes)
