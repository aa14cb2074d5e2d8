"""Objects read through source and fetcher, receivers and all, without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fastload_common.clock import SystemClock
from fastload_common.config import Settings, load_settings
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.stats import TransferStats

CHUNK_BYTES = 64 * 1024
BUCKET = "bucket"
URI = f"s3://{BUCKET}/m"


def settings(**changes: object) -> Settings:
    """Small chunks, few connections, and nothing on the terminal."""
    plain: dict[str, object] = {
        "progress": "off",
        "chunk_bytes": CHUNK_BYTES,
        "memory_bytes": 16 * CHUNK_BYTES,
        "concurrency": 4,
        "max_attempts": 4,
        "deadline_s": 60,
    }
    return load_settings(plain | changes, {})


class Ranges:
    """One object read through source and fetcher, for what a load as a whole does too much of."""

    def __init__(
        self, uri: str, with_: Settings, random: Callable[[], float], slots: int = 4
    ) -> None:
        self.source = open_source(uri, with_)
        self.arena = Arena(CHUNK_BYTES, slots)
        self.stats = TransferStats()
        self.fetcher = Fetcher(
            self.source,
            self.arena,
            TransferPolicy(
                concurrency=with_.concurrency or 4,
                max_attempts=with_.max_attempts,
                connect_timeout_s=with_.connect_timeout_s,
                read_timeout_s=with_.read_timeout_s,
                deadline_s=with_.deadline_s,
            ),
            SystemClock(),
            self.stats,
            random=random,
        )

    def chunks(self, object_id: ObjectId) -> list[Chunk]:
        edges = range(0, object_id.size_bytes, CHUNK_BYTES)
        return [
            Chunk(object_id, ByteRange(start, min(start + CHUNK_BYTES, object_id.size_bytes)), 1)
            for start in edges
        ]

    def read(self, object_id: ObjectId) -> bytes:
        found = bytearray(object_id.size_bytes)
        for filled in self.fetcher.fetch(self.chunks(object_id)):
            place = filled.chunk.byte_range
            found[place.start : place.end] = filled.data
            filled.release()
        return bytes(found)


@contextlib.contextmanager
def ranges(
    uri: str = URI, with_: Settings | None = None, random: Callable[[], float] = lambda: 0.0
) -> Iterator[Ranges]:
    """Reads of ranges without jitter: what is asked again is asked at once."""
    made = Ranges(uri, with_ or settings(), random)
    try:
        yield made
    finally:
        made.fetcher.close()
        leased = made.arena.leased_count
        made.arena.close()
        made.source.close()
    assert leased == 0
