"""How much of a reply has come, and whether it comes fast enough.

Silence is timed by the socket; this is for what trickles.
"""

from __future__ import annotations

from fastload_common.clock import Clock
from fastload_common.errors import SourceUnavailableError

__all__ = ["Pace", "Progress"]

# What comes more slowly is asked for anew, on another connection, from where it stopped.
_LEAST_BYTES_PER_S = 64 * 1024


class Pace:
    """When the part of a reply that is being received must be here.

    Args:
        clock: looked at before each receive.
        grace_s: what a part may take in any case.
    """

    def __init__(self, clock: Clock, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._due_s = 0.0

    def expect(self, size_bytes: int) -> None:
        """A part of this size comes next."""
        self._due_s = self._clock.monotonic_s() + self._grace_s + size_bytes / _LEAST_BYTES_PER_S

    def check(self) -> float:
        """The time. Raises `SourceUnavailableError` if it is late."""
        now_s = self._clock.monotonic_s()
        if now_s > self._due_s:
            raise SourceUnavailableError(
                "the reply came too slowly",
                hint=f"a head may take {self._grace_s:g} s (FASTLOAD_READ_TIMEOUT_S), a body so "
                f"much more as it needs at {_LEAST_BYTES_PER_S // 1024} KiB/s",
            )
        return now_s

    def elapsed_s(self, since_s: float) -> float:
        """Seconds since an earlier `check`."""
        return self._clock.monotonic_s() - since_s


class Progress:
    """How many body bytes are in the caller's buffer. One thread writes it, others may look."""

    def __init__(self) -> None:
        self.received_bytes = 0
