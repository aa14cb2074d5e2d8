"""Attempts of small calls: list, stat, put, read of a header. Not for the ranges of a load.

One policy for what goes through botocore and what goes over our own connections. A store that
answers "not now" is asked again patiently, since many loads start at one moment; one that is not
reached is given up soon, since then a name or a policy is wrong.
"""

from __future__ import annotations

import math
import random
import threading

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import DeadlineError, FastloadError

__all__ = ["Attempts", "SmallCalls"]

# Full jitter below the first ceiling, twice that, ... Busy: half a minute with 10 attempts.
_BUSY_FIRST_CEILING_S = 0.25
_BUSY_LONGEST_S = 20.0
_RETRY_AFTER_LONGEST_S = 60.0
_NETWORK_FIRST_CEILING_S = 0.1
_NETWORK_MOST_ATTEMPTS = 5

# Until a store has answered once, a call to it may take this long.
_FIRST_ANSWER_S = 10.0
# So that at least two attempts fit into it.
_FIRST_CONNECT_TIMEOUT_S = 3.0
_FIRST_READ_TIMEOUT_S = 4.0


class SmallCalls:
    """What the small calls of one source have in common. For any thread.

    Args:
        settings: ``max_attempts``, timeouts, and ``deadline_s``, which counts from now.
        clock: for the deadline, and for the waits between attempts.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.answered = False
        self._opened_s = clock.monotonic_s()

    def timeouts_s(self) -> tuple[float, float]:
        """Of connecting and of silence, for a client or a connection that is made now."""
        # No attempt alone takes longer than the whole load may.
        limit_s = math.inf if self.settings.deadline_s is None else self.settings.deadline_s
        connect_s = min(limit_s, self.settings.connect_timeout_s)
        read_s = min(limit_s, self.settings.read_timeout_s)
        if self.answered:
            return connect_s, read_s
        return min(connect_s, _FIRST_CONNECT_TIMEOUT_S), min(read_s, _FIRST_READ_TIMEOUT_S)

    def begin(self, asked: str, most: int | None = None) -> Attempts:
        """The attempts of one call.

        Args:
            asked: a verb phrase for the message.
            most: attempts, where that is fewer than the settings'.

        Raises:
            DeadlineError: there is no time left.
        """
        limit = self.settings.max_attempts
        attempts = Attempts(self, asked, limit if most is None else min(most, limit))
        attempts.check_deadline(0.0, None)
        return attempts

    def remaining_s(self) -> float | None:
        """Until the deadline; None without one."""
        limit_s = self.settings.deadline_s
        return None if limit_s is None else self._opened_s + limit_s - self.clock.monotonic_s()


class Attempts:
    """The attempts of one call, made one after the other; see `SmallCalls.begin`."""

    def __init__(self, calls: SmallCalls, asked: str, most: int) -> None:
        self._calls = calls
        self._asked = asked
        self._most = most
        self._busy = 0
        self._network = 0
        self._begun_s = self._last_begun_s = calls.clock.monotonic_s()

    def wait_or_raise(self, error: FastloadError) -> None:
        """After a failed attempt: wait before the next one, or raise the error if there is none.

        Raises:
            DeadlineError: the wait would outlast it.
        """
        status = error.fields.get("status", 0)
        if status:
            self._calls.answered = True
        if status == 429 or status >= 500:
            self._busy += 1
            ceiling_s = min(_BUSY_LONGEST_S, _BUSY_FIRST_CEILING_S * 2.0 ** min(self._busy - 1, 60))
            gives_up = self._busy >= self._most
        else:
            self._network += 1
            ceiling_s = _NETWORK_FIRST_CEILING_S * 2.0 ** (self._network - 1)
            most = min(self._most, _NETWORK_MOST_ATTEMPTS)
            gives_up = self._network >= most or self._is_first_answer_late()
        if not error.retryable or gives_up:
            error.fields["attempts"] = self._busy + self._network
            raise error
        # At least what the store asks for, and not all clients at one moment.
        asked_s = min(_RETRY_AFTER_LONGEST_S, float(error.fields.get("retry_after_s", 0.0)))
        wait_s = asked_s + random.uniform(0, ceiling_s)
        self.check_deadline(wait_s, error)
        self._calls.clock.wait(threading.Event(), wait_s)
        self._last_begun_s = self._calls.clock.monotonic_s()

    def check_deadline(self, ahead_s: float, error: FastloadError | None) -> None:
        """Raise if the deadline is within ``ahead_s`` from now."""
        remaining_s = self._calls.remaining_s()
        if remaining_s is not None and remaining_s <= ahead_s:
            raise DeadlineError(
                f"could not {self._asked} within {self._calls.settings.deadline_s:g} s after the "
                "source was opened",
                hint="raise FASTLOAD_DEADLINE_S, or see why the store is slow",
                attempts=self._busy + self._network,
                last_fault=None if error is None else f"{type(error).__name__}: {error}",
            ) from error

    def _is_first_answer_late(self) -> bool:
        """Whether one more attempt as long as the last would exceed the time for a first answer."""
        now_s = self._calls.clock.monotonic_s()
        end_s = now_s + (now_s - self._last_begun_s)
        return not self._calls.answered and end_s - self._begun_s > _FIRST_ANSWER_S
