"""A number of places that all pulls of this user on this node share: locked files in a directory.

A pull that ends, however it ends, gives its places back: the kernel drops its locks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from fastload_common.clock import Clock
from fastload_common.errors import PullError

__all__ = ["NodeSlots"]

_POLL_S = 0.1
_POLLS_BEFORE_WORD = 50

logger = logging.getLogger(__name__)


class NodeSlots:
    """Places of one kind. For any thread.

    Args:
        directory: of this user alone; made where it is missing.
        kind: names the files.
        count: how many places there are; None: no bound, and nothing is locked.
        clock: for the wait.
    """

    def __init__(self, directory: Path, kind: str, count: int | None, clock: Clock) -> None:
        self._directory = directory
        self._kind = kind
        self._count = count
        self._clock = clock

    @contextlib.contextmanager
    def taken(self, wanted: int, stop: threading.Event) -> Iterator[int | None]:
        """Hold as many places as are free, at most so many; waits for the first one.

        Gives their number; None where there is no bound; 0 where ``stop`` was set while it waited.

        Raises:
            PullError: the directory cannot be used.
        """
        if self._count is None:
            yield None
            return
        self._prepare()
        held: list[int] = []
        polls = 0
        try:
            while not held and not stop.is_set():
                for number in range(self._count):
                    if len(held) < wanted and (lock := self._try(number)) is not None:
                        held.append(lock)
                if not held:
                    polls += 1
                    if polls == _POLLS_BEFORE_WORD:
                        logger.warning(
                            "waits for other pulls of this node: all %d places for %ss are taken",
                            self._count,
                            self._kind,
                        )
                    self._clock.wait(stop, _POLL_S)
            yield len(held)
        finally:
            for lock in held:
                os.close(lock)

    def _prepare(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._directory.lstat()
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_mode & 0o022:
            raise self._unusable("others can write there")

    def _try(self, number: int) -> int | None:
        path = self._directory / f"{self._kind}-{number}"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._unusable(error.strerror or str(error)) from error
            return None
        return lock

    def _unusable(self, why: str) -> PullError:
        return PullError(
            f"the places of pulls on this node cannot be counted in {self._directory}: {why}",
            hint="remove it, or unset FASTLOAD_MAX_CONCURRENT_DOWNLOADS and "
            "FASTLOAD_MAX_CONCURRENT_UNPACKS",
        )
