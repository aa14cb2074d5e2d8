"""boto3 at its best: ranged `get_object` in threads, bodies read into memory that is re-used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from benchmarks.work import BUCKET, Item, Piece, Work, check


class BotoClient:
    """One client, as many threads and connections as asked for."""

    def __init__(self, work: Work) -> None:
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=work.connections)
        self._work = work
        self._client = boto3.client("s3", config=config)
        self._pool = ThreadPoolExecutor(work.connections)
        self._local = threading.local()

    def receive(self, items: tuple[Item, ...]) -> int:
        return sum(self._pool.map(self._get, self._work.pieces(items)))

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()

    def _get(self, piece: Piece) -> int:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(self._work.chunk_bytes))
        buffer = self._local.buffer[: piece.size_bytes]
        last = piece.start + piece.size_bytes - 1
        reply = self._client.get_object(
            Bucket=BUCKET, Key=piece.name, Range=f"bytes={piece.start}-{last}"
        )
        body, have = reply["Body"], 0
        while have < len(buffer) and (got := body.readinto(buffer[have:])):
            have += got
        body.close()
        check(buffer[:have], piece.start)
        return have


def open_client(work: Work) -> BotoClient:
    return BotoClient(work)
