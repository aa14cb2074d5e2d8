"""Tells at once when a client hangs up, also while nothing is read from or written to it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

__all__ = ["HangUpWatch"]


class HangUpWatch:
    """One thread that watches all connections. End it with `stop`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._thread = threading.Thread(target=self._run, name="rig-watch", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back once when the other side has closed or reset this socket."""
        with self._lock:
            self._callbacks[descriptor] = callback
            self._epoll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def remove(self, descriptor: int) -> None:
        """Before the socket is closed: its number is used again."""
        with self._lock:
            if self._callbacks.pop(descriptor, None) is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(descriptor)

    def stop(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._epoll.close()
        os.close(self._wake)

    def check(self, descriptor: int) -> None:
        """Call back if this socket's other side has indeed hung up."""
        with self._lock:
            callback = self._callbacks.get(descriptor)
            # The news may be of an earlier socket that had this number.
            if callback is not None and _has_hung_up(descriptor):
                callback()

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._wake:
                    return
                self.check(descriptor)


def _has_hung_up(descriptor: int) -> bool:
    probe = select.poll()
    probe.register(descriptor, select.POLLRDHUP)
    return bool(probe.poll(0))
