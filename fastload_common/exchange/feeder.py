"""The thread that fetches what this rank owns, and tells each chunk to those who need it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence

from fastload_common.exchange.slots import Filled
from fastload_common.exchange.terms import Fetch
from fastload_common.plan.records import Chunk

__all__ = ["Feeder"]

_JOIN_S = 5.0


class Feeder:
    """Fetches chunks, one call, in a thread of its own.

    Args:
        fetch: see `Terms.fetch`.
        chunks: this rank's own, in the order in which they are to be asked for.
        share: told each filled chunk, by the thread.
        ended: told at the end, by the thread; with the error if there was one.
    """

    def __init__(
        self,
        fetch: Fetch,
        chunks: Sequence[Chunk],
        share: Callable[[Filled], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._fetch, self._chunks = fetch, chunks
        self._share, self._ended = share, ended
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fastload-feeder", daemon=True)
        self._thread.start()

    def stop(self, abort: Callable[[], None]) -> bool:
        """End it: whether it has. ``abort`` makes its fetch fail where it still runs."""
        self._stopping.set()
        if self._thread.is_alive():
            abort()
            self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for its end, which is near: it has told its last chunk."""
        self._thread.join()

    def _work(self) -> None:
        try:
            filling = self._fetch(self._chunks)
            try:
                for filled in filling:
                    if self._stopping.is_set():
                        filled.release()
                        break
                    self._share(filled)
            finally:
                if isinstance(filling, Generator):
                    filling.close()  # ends its requests
        except BaseException as error:  # noqa: BLE001 -- raised again by the loading thread
            self._ended(error)
        else:
            self._ended(None)
