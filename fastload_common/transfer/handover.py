"""A busy interpreter hands its lock over sooner while chunks are fetched.

Whatever thread of ours waits for the lock gets it after a switch interval, and gives it away with
each system call: at Python's 5 ms a turn of the pump, which makes some five, takes 25 ms beside a
thread that computes, and a fast store's connections have nothing to do meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

__all__ = ["SWITCH_INTERVAL_S", "quick_handover"]

# Measured with benchmarks/busy.py: see docs/decisions/0006.
SWITCH_INTERVAL_S = 0.0005

# A generator may be collected, and leave, wherever its thread allocates: here, too.
_lock = threading.RLock()
_users = 0
_before_s = 0.0
_knows_forks = False


@contextlib.contextmanager
def quick_handover() -> Iterator[None]:
    """While any thread is in here the process's switch interval is short; then it is as before.

    An interval that is shorter already stays, and so does one that somebody sets meanwhile.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _users, _before_s, _knows_forks
    with _lock:
        if not _knows_forks:
            _knows_forks = True
            os.register_at_fork(after_in_child=_begin_anew)
        _users += 1
        if _users == 1:
            _before_s = sys.getswitchinterval()
            if _before_s > SWITCH_INTERVAL_S:
                sys.setswitchinterval(SWITCH_INTERVAL_S)


def _leave() -> None:
    global _users
    with _lock:
        if _users:  # a forked process leaves what its parent has entered
            _users -= 1
            if not _users:
                _restore()


def _restore() -> None:
    is_ours = abs(sys.getswitchinterval() - SWITCH_INTERVAL_S) < 1e-6
    if is_ours and _before_s > SWITCH_INTERVAL_S:
        sys.setswitchinterval(_before_s)


def _begin_anew() -> None:
    """In a forked process, whose other threads are gone, perhaps with the lock in their hands."""
    global _lock, _users
    _lock = threading.RLock()
    if _users:
        _users = 0
        _restore()
