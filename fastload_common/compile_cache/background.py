"""Work that nobody waits for, and calls that nobody waits for longer than a deadline."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import TypeVar

from fastload_common.clock import Clock
from fastload_common.errors import DeadlineError, FastloadError

__all__ = ["Background", "within"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AT_EXIT = 10


def within(clock: Clock, limit_s: float, asked: str, task: Callable[[], T]) -> T:
    """The task's result or error; if it takes longer it is left to itself.

    Args:
        asked: a verb phrase for the message.

    Raises:
        DeadlineError: it was not done in time.
    """
    done = threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(task())
        except BaseException as error:  # noqa: BLE001  (raised in the caller's thread)
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="fastload-compile-cache-call", daemon=True).start()
    if not clock.wait(done, limit_s):
        raise DeadlineError(
            f"could not {asked} within {limit_s:g} s",
            hint="see why S3 is slow, or raise FASTLOAD_COMPILE_CACHE_DEADLINE_S",
        )
    if failures:
        raise failures[0]
    return results[0]


class Background:
    """Does jobs in turn, in a thread that is there as long as there are any.

    Args:
        limit_s: longest that the end of the process waits for jobs.
    """

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._at_exit: Finalize | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def _renew_after_fork(self) -> None:
        # The parent's thread and its jobs are the parent's.
        if self._pid != os.getpid():
            self._at_exit = None
            self._start_anew()

    def submit(self, name: str, job: Callable[[], None]) -> None:
        """Do it after the others.

        Args:
            name: a noun for the message if it fails.
        """
        self._renew_after_fork()
        with self._lock:
            self._waiting += 1
            self._idle.clear()
            self._jobs.put((name, job))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="fastload-compile-cache", daemon=True
                )
                self._thread.start()
            if self._at_exit is None:
                # A process that multiprocessing started runs these, and not what atexit knows.
                self._at_exit = Finalize(None, self.finish, exitpriority=_AT_EXIT)

    def finish(self, limit_s: float | None = None) -> bool:
        """Wait until there is nothing left to do, or the limit; True if there is nothing."""
        self._renew_after_fork()
        done = self._clock.wait(self._idle, self._limit_s if limit_s is None else limit_s)
        if not done:
            logger.warning(
                "fastload: the compile cache was not done in time; what is missing is published by "
                "a later start"
            )
        return done

    def close(self, limit_s: float | None = None) -> bool:
        """`finish`, and nothing more at the end of the process."""
        done = self.finish(limit_s)
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        return done

    def _run(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do one job; whether there is another one. Else the thread ends."""
        name, job = self._jobs.get()
        try:
            job()
        except BaseException as error:  # noqa: BLE001  (a cache's failure ends no server)
            # A foreign error's text may hold a signed URL.
            text = f": {error}" if isinstance(error, FastloadError | OSError) else ""
            logger.warning("fastload: %s failed: %s%s", name, type(error).__name__, text)
        with self._lock:
            self._waiting -= 1
            if self._waiting:
                return True
            self._thread = None
            self._idle.set()
            return False
