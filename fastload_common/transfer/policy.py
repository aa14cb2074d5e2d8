"""When to ask again, how long to wait, when to give up. Pure: no clock, no I/O, no state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastload_common.units import MIB

__all__ = ["TransferPolicy"]


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """How ranges are fetched.

    Attributes:
        concurrency: most requests in flight.
        start_concurrency: requests in flight at the beginning; None: as many as ``concurrency``.
        max_bytes_per_s: cap on the bytes asked for, of this process; None: no cap.
        burst_bytes: what may be asked for at once under that cap; without one, the largest request.
        max_attempts: attempts for one range before its error ends the fetch. Attempts that
            brought at least ``progress_bytes`` do not count, so a range sees at most
            ``max_attempts + size / progress_bytes`` requests.
        connect_timeout_s: longest wait for a connection; kept by whoever receives.
        read_timeout_s: longest silence of a connection; kept by whoever receives.
        deadline_s: longest duration of the whole load; None for no limit.
        backoff_base_s: the first back-off is drawn from ``[0, backoff_base_s)``; the bound
            doubles with each failure. 32 throttled connections then ask about 130 times in
            the first half second, not thousands of times.
        backoff_cap_s: bound of that bound.
        retry_after_cap_s: a server's Retry-After is honoured up to this.
        progress_bytes: see ``max_attempts``. A link that resets often but moves data is no
            reason to fail.
        hedging: whether slow requests are raced and ended; without it only the read timeout does.
    """

    concurrency: int
    max_attempts: int
    connect_timeout_s: float
    read_timeout_s: float
    deadline_s: float | None = None
    backoff_base_s: float = 0.25
    backoff_cap_s: float = 20.0
    retry_after_cap_s: float = 60.0
    progress_bytes: int = 1 * MIB
    hedging: bool = True
    start_concurrency: int | None = None
    max_bytes_per_s: float | None = None
    burst_bytes: int = 16 * MIB

    def backoff_delay_s(
        self, attempt: int, random: Callable[[], float], retry_after_s: float | None = None
    ) -> float:
        """Seconds to wait before the next attempt, with full jitter.

        Args:
            attempt: failures so far that count, from 1; 0 after one that made progress.
            random: draws from ``[0, 1)``.
            retry_after_s: what the server asked for; the wait is then at least that (up to
                ``retry_after_cap_s``), plus the jitter, so that clients do not return together.
        """
        doublings = min(max(attempt - 1, 0), 60)  # far beyond the cap, and no overflow
        bound_s = min(self.backoff_cap_s, self.backoff_base_s * 2.0**doublings)
        jitter_s = bound_s * random()
        if retry_after_s is None:
            return jitter_s
        return min(max(retry_after_s, 0.0), self.retry_after_cap_s) + jitter_s
