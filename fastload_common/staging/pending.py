"""Chunks that copies still read: each is given back when its mark is reached, oldest first.

A thread waits for the marks, since the loading thread may be waiting for a chunk that needs just
this memory. A mark that fails gives its chunk back too: the load fails, and whoever waits for the
memory must come to know.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from fastload_common.staging.device import Mark

__all__ = ["Pending"]

_JOIN_S = 10.0


class Pending:
    """What is still read. `add`, `drain` and `close` are the loading thread's.

    Args:
        enter: the thread waits inside of this.
        threaded: whether there is a thread; else `release_done` or `drain` must be called.
    """

    def __init__(
        self, enter: Callable[[], AbstractContextManager[object]], *, threaded: bool = True
    ) -> None:
        self._enter = enter
        self._threaded = threaded
        self._waiting: deque[tuple[Mark, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, mark: Mark, release: Callable[[], None]) -> None:
        """Call ``release`` when the mark is reached, or has failed."""
        with self._changed:
            self._waiting.append((mark, release))
            self._changed.notify_all()
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="fastload-copies", daemon=True)
            self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """The first that happened."""
        return self._errors[0] if self._errors else None

    def fail(self, error: BaseException) -> None:
        """Keep an error that happened elsewhere."""
        self._errors.append(error)

    def release_done(self) -> None:
        """Give back what is not read any more. Never waits; only without a thread."""
        while self._waiting and self._is_reached(self._waiting[0][0]):
            self._release_oldest()

    def drain(self) -> None:
        """Return when everything was given back. Raises nothing: see `error`."""
        if not self._threaded:
            while self._waiting:
                self._release_oldest()
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Drain, and end the thread."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _work(self) -> None:
        try:
            with self._enter():
                self._serve()
        except BaseException as error:  # noqa: BLE001 -- raised by the loading thread
            self._errors.append(error)
            self._serve()  # whoever waits for memory must come to know

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
            self._release_oldest()

    @staticmethod
    def _is_reached(mark: Mark) -> bool:
        try:
            return mark.is_done()
        except Exception:  # noqa: BLE001 -- `wait` raises it again, where it is kept
            return True

    def _release_oldest(self) -> None:
        mark, release = self._waiting[0]
        for step in (mark.wait, release):
            try:
                step()
            except BaseException as error:  # noqa: BLE001 -- raised by the loading thread
                self._errors.append(error)
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()
