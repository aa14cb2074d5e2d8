"""A clock that moves only when a test says so."""

from __future__ import annotations

import threading
import time

__all__ = ["FakeClock"]

# Real seconds between two looks at the event and at the fake time.
_POLL_S = 0.001


class FakeClock:
    """Implements `fastload_common.clock.Clock`.

    Args:
        auto: a `wait` for an event that is not set moves the clock to its end by itself and
            returns at once, as if nothing else happened meanwhile. For timelines of one thread.
            Otherwise a `wait` blocks until its event is set or `advance` has moved the clock
            past its end.
        start_s: the first reading of `monotonic_s`.
    """

    def __init__(self, *, auto: bool = False, start_s: float = 1000.0) -> None:
        self._auto = auto
        self._now_s = start_s
        self._changed = threading.Condition()
        self._waiting = 0
        self.waits_s: list[float] = []
        """The timeouts of all waits so far, in the order in which they began."""

    def monotonic_s(self) -> float:
        with self._changed:
            return self._now_s

    def wall_s(self) -> float:
        return 1_800_000_000.0 + self.monotonic_s()

    def process_cpu_s(self) -> float:
        return self.monotonic_s()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        with self._changed:
            self.waits_s.append(timeout_s)
            end_s = self._now_s + timeout_s
            if self._auto and not event.is_set():
                self._now_s = end_s
                return False
            self._waiting += 1
            self._changed.notify_all()
            try:
                while not event.is_set() and self._now_s < end_s:
                    self._changed.wait(_POLL_S)
            finally:
                self._waiting -= 1
            return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move the clock; waits whose end is reached return."""
        with self._changed:
            self._now_s += seconds
            self._changed.notify_all()

    def wait_for_waiters(self, count: int, *, real_timeout_s: float = 10.0) -> None:
        """Block until ``count`` threads stand in `wait`, so that a test may advance.

        Raises:
            TimeoutError: they do not, within real seconds.
        """
        end_s = time.monotonic() + real_timeout_s  # noqa: TID251 -- a hang must end for real
        with self._changed:
            while self._waiting < count:
                if time.monotonic() > end_s:  # noqa: TID251
                    raise TimeoutError(f"{self._waiting} of {count} threads wait on the clock")
                self._changed.wait(0.01)
