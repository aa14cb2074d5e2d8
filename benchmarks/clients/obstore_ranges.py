"""obstore's `get_range_async`, as many at once as asked for, copied into memory that is re-used."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.work import BUCKET, Item, Piece, Work, check
from fastload_common.config import environment


class ObstoreClient:
    """One store; a semaphore bounds the requests in flight."""

    def __init__(self, work: Work) -> None:
        import obstore  # type: ignore[import-not-found,unused-ignore]
        from obstore.store import S3Store  # type: ignore[import-not-found,unused-ignore]

        environ = environment()
        options: dict[str, Any] = {"allow_http": True, "timeout": timedelta(seconds=120)}
        if bundle := environ.get("AWS_CA_BUNDLE"):
            options["root_certificate"] = Path(bundle).read_text(encoding="ascii")
        config: Any = {
            "endpoint": environ["AWS_ENDPOINT_URL"],
            "region": environ["AWS_REGION"],
            "access_key_id": environ["AWS_ACCESS_KEY_ID"],
            "secret_access_key": environ["AWS_SECRET_ACCESS_KEY"],
            "virtual_hosted_style_request": False,
        }
        self._work = work
        self._get_range = obstore.get_range_async
        self._store = S3Store(BUCKET, config=config, client_options=options)
        self._loop = asyncio.new_event_loop()
        self._buffer = bytearray(work.chunk_bytes)

    def receive(self, items: tuple[Item, ...]) -> int:
        return self._loop.run_until_complete(self._receive(self._work.pieces(items)))

    def close(self) -> None:
        self._loop.close()

    async def _receive(self, pieces: list[Piece]) -> int:
        free = asyncio.Semaphore(self._work.connections)

        async def get(piece: Piece) -> int:
            async with free:
                data = await self._get_range(
                    self._store, piece.name, start=piece.start, length=piece.size_bytes
                )
                self._buffer[: len(data)] = memoryview(data)
                check(memoryview(self._buffer)[: len(data)], piece.start)
                return len(data)

        return sum(await asyncio.gather(*map(get, pieces)))


def open_client(work: Work) -> ObstoreClient:
    return ObstoreClient(work)
