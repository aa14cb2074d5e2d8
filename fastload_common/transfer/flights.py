"""Attempts on the wire as the rules for slow ones see them: one, its rate, all of them together.

Pure: time is an argument. For one thread.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Crowd", "Flight", "RateMeter"]


@dataclass(frozen=True, slots=True)
class Flight:
    """One attempt as it is now.

    Attributes:
        started_s: when a connection took it up.
        first_byte_s: from the start to the reply's head; None while there is none.
        last_progress_s: when bytes or the head last came; ``started_s`` before.
        rate_bytes_per_s: over its last few seconds (`RateMeter`); None while not known.
        hedged: another attempt for the same bytes runs.
        kills: attempts for the same bytes that were ended for being slow.
    """

    started_s: float
    size_bytes: int
    received_bytes: int
    first_byte_s: float | None
    last_progress_s: float
    rate_bytes_per_s: float | None
    hedged: bool
    kills: int = 0


class RateMeter:
    """Bytes per second of one attempt over its last few seconds.

    Args:
        window_s: how far back.
    """

    __slots__ = ("_marks", "_window_s")

    WINDOW_S: ClassVar[float] = 3.0

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._marks: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, received_bytes: int) -> None:
        """Take note that so many bytes are here, all together."""
        marks = self._marks
        marks.append((now_s, received_bytes))
        # The newest mark at or before the window's start stays, to measure from.
        while len(marks) > 2 and marks[1][0] <= now_s - self._window_s:
            marks.popleft()

    def rate_bytes_per_s(self, now_s: float) -> float | None:
        """The rate now, silence included; None before there is anything to measure."""
        marks = self._marks
        if not marks:
            return None
        begin_s = now_s - self._window_s
        while len(marks) > 1 and marks[1][0] <= begin_s:
            marks.popleft()
        start_s, start_bytes = marks[0]
        elapsed_s = now_s - max(start_s, begin_s)
        if elapsed_s <= 0:
            return None
        return (marks[-1][1] - start_bytes) / elapsed_s


class Crowd:
    """What the attempts of a load do now, taken together: whether it is one that is slow, or all.

    Attributes:
        is_one: whether there are enough of them to tell. Near the end there are not: those that are
            left are the slow ones.
        rate_bytes_per_s: the median rate of those whose body is coming; None if too few are.
        silence_s: the median of their silences, or of a moment ago.
        served_s: the latest start of an attempt that got its head; ``-inf`` before.
        overslept: it was we who did not look for a while; what came meanwhile may not have been
            told yet, so nobody is judged this time.
    """

    __slots__ = (
        "_looked_s",
        "_peak",
        "is_one",
        "overslept",
        "rate_bytes_per_s",
        "served_s",
        "silence_s",
    )

    LEAST: ClassVar[int] = 4
    """Fewer attempts are no crowd, nor are fewer than half of what there were."""
    HALF_LIFE_S: ClassVar[float] = 1.0
    OVERSLEPT_S: ClassVar[float] = 0.25
    """A stopped process, or an engine that held the interpreter's lock."""

    def __init__(self) -> None:
        self._peak = 0
        self._looked_s: float | None = None
        self.overslept = False
        self.is_one = False
        self.rate_bytes_per_s: float | None = None
        self.silence_s = 0.0
        self.served_s = -math.inf

    def look(self, now_s: float, flights: Iterable[Flight]) -> None:
        """See all attempts in flight; call it once before they are judged, each time."""
        rates, silences = [], []
        size = 0
        for flight in flights:
            size += 1
            if flight.first_byte_s is None:
                continue
            self.served_s = max(self.served_s, flight.started_s)
            silences.append(now_s - flight.last_progress_s)
            if flight.rate_bytes_per_s is not None:
                rates.append(flight.rate_bytes_per_s)
        self._peak = max(self._peak, size)
        self.is_one = size >= max(self.LEAST, self._peak / 2)
        self.rate_bytes_per_s = statistics.median(rates) if len(rates) >= self.LEAST else None
        silence_s = statistics.median(silences) if len(silences) >= self.LEAST else 0.0
        # Slices come in bunches: what it was just now counts too.
        asleep_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self.silence_s = max(silence_s, self.silence_s * 0.5 ** (asleep_s / self.HALF_LIFE_S))
        self.overslept = asleep_s > self.OVERSLEPT_S
        self._looked_s = now_s
