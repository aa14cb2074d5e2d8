"""Where one thread waits for whatever happens: events that others post, and readable sockets."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

from fastload_common.transfer.lanes import Event

__all__ = ["Mailbox"]


class Mailbox:
    """Owned by one thread, which alone calls `wait`; `post` and `wake` are for any thread.

    Every system call that can block hands the interpreter's lock over, and a busy interpreter takes
    5 ms to hand it back. So one `wait` takes all that has come, with one such call a socket.
    """

    def __init__(self) -> None:
        self._posted: deque[Event] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False
        self._closed = False
        self._lock = threading.Lock()  # guards the descriptor against a wake after its end
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)

    def post(self, event: Event) -> None:
        """Hand over an event."""
        self._posted.append(event)
        self.wake()

    def wake(self) -> None:
        """Let `wait` return now."""
        if self._awake:
            return
        with self._lock:
            if not self._closed:
                self._awake = True
                os.eventfd_write(self._wake_fd, 1)

    def watch(self, peer: socket.socket, read: Callable[[], Iterable[Event]]) -> None:
        """Have `wait` call ``read`` whenever the socket has something to say, or is closed."""
        self._selector.register(peer, selectors.EVENT_READ, read)

    def unwatch(self, peer: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer)

    def wait(self, timeout_s: float) -> list[Event]:
        """All events that have come; waits for the first of them, at most so long (real time)."""
        found: list[Event] = []
        for key, _ in self._selector.select(0 if self._posted else max(0.0, timeout_s)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                # After that, or a wake in between would be the last one ever; and before what was
                # posted is taken, so that none is missed.
                self._awake = False
            else:
                found.extend(key.data())
        while self._posted:
            found.append(self._posted.popleft())
        return found

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._selector.close()
                os.close(self._wake_fd)
