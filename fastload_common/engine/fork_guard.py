"""A part of a thread's work during which its process does not fork.

A child that is forked has one thread, and every lock that another one held stays locked in it:
those of modules that were being imported, above all. Engines fork their ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["no_fork"]

_LONGEST_S = 10.0
"""A fork waits no longer: a disk that hangs must not keep an engine from starting."""

_lock = threading.Lock()
_state = threading.local()
_registering = threading.Lock()
_is_registered = False


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """Keep other threads from forking meanwhile. The work is short, and forks nothing itself."""
    global _is_registered
    with _registering:
        if not _is_registered:
            os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after)
            _is_registered = True
    with _lock:
        yield


def _before() -> None:
    _state.has_it = _lock.acquire(timeout=_LONGEST_S)


def _after() -> None:
    if getattr(_state, "has_it", False):
        _state.has_it = False
        _lock.release()
