"""Entries that are being written, or on their way out: whose writer is dead is removed.

A living writer holds a lock on its draft, which the kernel releases when it dies. Only where no
locks can be had does the age decide, and so the clocks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fastload_common.clock import Clock
from fastload_common.compile_cache.stores.directory import try_lock

__all__ = ["Drafts"]

_ABANDONED_S = 24 * 3600.0
"""Where locks do not tell whether a draft's writer lives, it is taken for dead after this."""

_YOUNG_S = 60.0
"""A draft this young may not have been locked by its writer yet."""


class Drafts:
    """A directory of drafts.

    Args:
        directory: of one file system with where they are renamed to; made by the caller.
        clock: for the age of drafts.
        locks_work: whether locks on this file system tell anything.
    """

    def __init__(self, directory: Path, clock: Clock, locks_work: Callable[[], bool]) -> None:
        self.directory = directory
        self._clock = clock
        self._locks_work = locks_work

    @contextlib.contextmanager
    def new(self) -> Iterator[Path]:
        """A new directory that every user may read; removed at the end, unless it was renamed."""
        path = Path(tempfile.mkdtemp(dir=self.directory))
        descriptor = _open(path)
        try:
            if self._locks_work():
                try_lock(descriptor)
            os.chmod(descriptor, 0o755)
            yield path
        finally:
            os.close(descriptor)
            shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> None:
        """Remove drafts whose writers are dead."""
        try:
            drafts = list(self.directory.iterdir())
        except FileNotFoundError:
            return
        for path in drafts:
            with contextlib.suppress(OSError):
                # Whichever clock is wrong, time goes on.
                age_s = abs(self._clock.wall_s() - path.lstat().st_mtime)
                if age_s > _YOUNG_S and self._is_abandoned(path, age_s):
                    shutil.rmtree(path, ignore_errors=True)

    def _is_abandoned(self, draft: Path, age_s: float) -> bool:
        is_free = None
        if self._locks_work():
            descriptor = _open(draft)
            try:
                is_free = try_lock(descriptor)
            finally:
                os.close(descriptor)
        return age_s > _ABANDONED_S if is_free is None else is_free


def _open(draft: Path) -> int:
    return os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
