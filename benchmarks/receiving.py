"""The measured Python clients. Each runs alone in a process and prints what it cost.

    python -m benchmarks.receiving CLIENT OBJECT_BYTES TOTAL_BYTES CHUNK_BYTES CONNECTIONS

The endpoint and credentials come from the usual AWS variables. Connections are open and memory
is touched before the measurement begins, as in the C client.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.compiled import word_at

__all__ = ["BUCKET", "CLIENTS", "KEY", "Work"]

BUCKET = "bucket"
KEY = "object"
_WARM_ROUNDS = 2

Transfer = Callable[[int], None]
"""Receives that many chunks."""


@dataclass(frozen=True, slots=True)
class Work:
    """What every client does: chunks of one object, over and over, until the total is there."""

    object_bytes: int
    total_bytes: int
    chunk_bytes: int
    connections: int

    def offsets(self, chunk_count: int) -> list[int]:
        """Where each of the chunks begins."""
        chunks_of_object = self.object_bytes // self.chunk_bytes
        return [index % chunks_of_object * self.chunk_bytes for index in range(chunk_count)]


def check(data: bytes | memoryview, offset: int) -> None:
    """Compare the first and the last word."""
    found = struct.unpack_from("<Q", data), struct.unpack_from("<Q", data, len(data) - 8)
    expected = (word_at(offset),), (word_at(offset + len(data) - 8),)
    if found != expected:
        raise AssertionError(f"wrong bytes at {offset}")


def fastload_client(work: Work) -> Transfer:
    """Our whole receiving path: S3 source with signing, fetcher, staging memory."""
    from fastload_common.clock import SystemClock
    from fastload_common.config import Settings
    from fastload_common.plan.records import Chunk
    from fastload_common.ranges import ByteRange
    from fastload_common.source.registry import open_source
    from fastload_common.staging.arena import Arena
    from fastload_common.transfer.fetcher import Fetcher
    from fastload_common.transfer.policy import TransferPolicy
    from fastload_common.transfer.stats import TransferStats

    settings = Settings(concurrency=work.connections, chunk_bytes=work.chunk_bytes)
    source = open_source(f"s3://{BUCKET}", settings)
    object_id = source.stat(KEY)
    arena = Arena(work.chunk_bytes, work.connections + work.connections // 4)
    for slot in [arena.lease() for _ in range(arena.slot_count)]:
        assert slot is not None
        slot.release()
    policy = TransferPolicy.from_settings(settings)
    fetcher = Fetcher(source, arena, policy, SystemClock(), TransferStats())

    def transfer(chunk_count: int) -> None:
        chunks = [
            Chunk(object_id, ByteRange(offset, offset + work.chunk_bytes), work.chunk_bytes)
            for offset in work.offsets(chunk_count)
        ]
        for filled in fetcher.fetch(chunks):
            check(filled.data, filled.chunk.byte_range.start)
            filled.release()

    return transfer


def boto3_client(work: Work) -> Transfer:
    """What many a loader does: ranged `get_object` in threads, body read into bytes."""
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=work.connections))
    pool = ThreadPoolExecutor(work.connections)

    def get(offset: int) -> None:
        last = offset + work.chunk_bytes - 1
        reply = client.get_object(Bucket=BUCKET, Key=KEY, Range=f"bytes={offset}-{last}")
        check(reply["Body"].read(), offset)

    def transfer(chunk_count: int) -> None:
        for _ in pool.map(get, work.offsets(chunk_count)):
            pass

    return transfer


CLIENTS: dict[str, Callable[[Work], Transfer]] = {
    "fastload": fastload_client,
    "boto3": boto3_client,
}


def cpu_s() -> float:
    """User and system seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(arguments: list[str]) -> None:
    name, *numbers = arguments
    work = Work(*map(int, numbers))
    transfer = CLIENTS[name](work)
    transfer(_WARM_ROUNDS * work.connections)
    began_cpu_s, began_s = cpu_s(), time.monotonic()
    transfer(work.total_bytes // work.chunk_bytes)
    print(json.dumps({"cpu_s": cpu_s() - began_cpu_s, "wall_s": time.monotonic() - began_s}))


if __name__ == "__main__":
    main(sys.argv[1:])
