"""What a load has seen of its own requests. Pure: no clock, no I/O. For one thread."""

from __future__ import annotations

import bisect
import math
from collections import deque

__all__ = ["MIN_SAMPLES", "Observed"]

MIN_SAMPLES = 8
"""Fewer tell nothing about a percentile."""


class Observed:
    """The newest successful requests: time to the first byte, and time for each byte of the body.

    Only attempts that succeed are added, so those that were ended for being slow are missing. The
    median does not feel that. A high percentile is too low by the share of those ended, which is
    the safe side: slow requests that we end must not raise the bar for the next ones.

    An addition and a percentile cost about a microsecond each: both lists are kept sorted.

    Args:
        window: how many requests are kept. 256 at 32 connections is the last few seconds.
    """

    __slots__ = ("_bodies", "_first_bytes", "_samples", "_window")

    def __init__(self, window: int = 256) -> None:
        if window < MIN_SAMPLES:
            raise ValueError(f"a window of {window} requests, less than {MIN_SAMPLES}")
        self._window = window
        self._samples: deque[tuple[float, float]] = deque()
        self._first_bytes: list[float] = []
        self._bodies: list[float] = []

    @property
    def count(self) -> int:
        """Requests in the window."""
        return len(self._samples)

    def add(
        self, *, first_byte_s: float, total_s: float, size_bytes: int, new_connection: bool
    ) -> None:
        """Take note of a request that succeeded.

        Args:
            first_byte_s: to the reply's head; with the time to connect for a new connection,
                which a hedge has to pay as well.
            total_s: to the last byte.
            size_bytes: of the body; empty ones are left out.
            new_connection: whether ``first_byte_s`` holds the time to connect.
        """
        if size_bytes <= 0 or not (math.isfinite(first_byte_s) and math.isfinite(total_s)):
            return
        first_byte_s = max(first_byte_s, 0.0)
        body_s_per_byte = max(total_s - first_byte_s, 0.0) / size_bytes
        if len(self._samples) == self._window:
            old_first_byte_s, old_body_s_per_byte = self._samples.popleft()
            del self._first_bytes[bisect.bisect_left(self._first_bytes, old_first_byte_s)]
            del self._bodies[bisect.bisect_left(self._bodies, old_body_s_per_byte)]
        self._samples.append((first_byte_s, body_s_per_byte))
        bisect.insort(self._first_bytes, first_byte_s)
        bisect.insort(self._bodies, body_s_per_byte)

    def first_byte_s(self, percent: float) -> float | None:
        """A percentile of the time to the first byte; None below `MIN_SAMPLES`."""
        return _percentile(self._first_bytes, percent)

    def body_s_per_byte(self, percent: float) -> float | None:
        """A percentile of the time for each byte after the first; None below `MIN_SAMPLES`."""
        return _percentile(self._bodies, percent)

    def expected_s(self, size_bytes: int, percent: float = 50) -> float | None:
        """How long a request for so many bytes would take that began now; None if not known."""
        first_byte_s = self.first_byte_s(percent)
        body_s_per_byte = self.body_s_per_byte(percent)
        if first_byte_s is None or body_s_per_byte is None:
            return None
        return first_byte_s + size_bytes * body_s_per_byte

    @property
    def bytes_per_s_of_connection(self) -> float | None:
        """What one connection gives between the first byte and the last, in the median."""
        body_s_per_byte = self.body_s_per_byte(50)
        if body_s_per_byte is None:
            return None
        return 1 / body_s_per_byte if body_s_per_byte > 0 else math.inf


def _percentile(ordered: list[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` of them do not exceed."""
    if len(ordered) < MIN_SAMPLES:
        return None
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[min(max(rank, 1), len(ordered)) - 1]
