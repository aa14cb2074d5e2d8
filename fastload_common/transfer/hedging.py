"""When a request is too slow, and what to do about it. Pure: time is an argument.

Judged by what this load sees of its other requests, not by a fixed number alone. The timer counts
from when a connection has taken the request up, never the time in a queue.

- **Hedge**: a second request races for the missing bytes. Worth it when a fresh one would probably
  be done clearly before this one.
- **Kill**: end it and ask the missing bytes on a fresh connection. For what brings nothing, or next
  to nothing, whether it is hedged or not. Costs no byte twice.

When everything is slow, a second request only makes it slower. So a silence counts at once only
while others are served, and a rate only beside the others' rates (`Crowd`). Otherwise a few may
try after a while, within the `HedgeBudget`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from fastload_common.transfer.flights import Crowd, Flight, RateMeter
from fastload_common.transfer.observed import Observed
from fastload_common.units import KIB, MIB

__all__ = ["Crowd", "Flight", "HedgeBudget", "RateMeter", "SlowPolicy", "Verdict"]


class Verdict(enum.Enum):
    """What to do with an attempt."""

    WAIT = "wait"
    HEDGE = "hedge"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class SlowPolicy:
    """The rules, and their constants with the reasons.

    Attributes:
        unknown_late_s: a first byte is late after this while nothing has been observed, or nobody
            else is served. S3 takes tens of milliseconds, a distant or cold store several hundred.
        least_late_s: nothing is late before this. Progress is told and looked at every 50 ms, and
            a busy machine delays its own receivers by as much again.
        idle_least_late_s: the same at the end of a load.
        late_factor: a silence is late at so many times the 95th percentile of the first byte. With
            a lognormal latency of sigma 1 it leaves about 0.3 % of requests.
        idle_late_factor: the same at the end of a load.
        progress_bytes: a lane tells of progress at least so often; silence within that says
            nothing.
        slow_factor: a body is slow when it needs so many times what a fresh request would need.
            Three: one that is three times slower than the median is not worth twice the bytes
            while there is other work for the link.
        idle_slow_factor: the same at the end of a load, when only the last request counts.
        slow_gain_s: a hedge must win at least so much; requests about to end are left alone.
        idle_gain_s: the same at the end of a load.
        rate_age_s: a rate over less, or over less than two slices, is not judged: the others'
            rates are of the same time only from here on.
        idle_rate_age_s: the same at the end of a load, when there is no time and no crowd.
        floor_bytes_per_s: what is below is ended, unless the others are hardly faster.
        floor_age_s: measured over so long.
        floor_factor: so many times slower than the others' median is more than hardly.
        dead_bytes_per_s: what is below is ended whatever the others do.
        kill_factor: silence is ended at so many times what is late.
        least_kill_s: at the earliest, unless it is hedged: the other one runs on.
        most_kill_s: at the latest.
        read_timeout_s: bound of all this. Each attempt for the same bytes that was ended doubles
            the silence that ends the next one up to here: an object that is slow by nature, such
            as a cold one, must come at last.
        crowd_factor: a body's silence is late at so many times the others' median: on a slow link
            all wait for their next slice, evenly between nothing and twice the median.
        probe_s: at the most so long. Perhaps it is not the link that fell silent, but all
            connections that were open, and new ones work.
    """

    unknown_late_s: float = 1.5
    least_late_s: float = 0.25
    idle_least_late_s: float = 0.2
    late_factor: float = 3.0
    idle_late_factor: float = 2.0
    progress_bytes: int = 256 * KIB
    slow_factor: float = 3.0
    idle_slow_factor: float = 1.5
    slow_gain_s: float = 0.5
    idle_gain_s: float = 0.05
    rate_age_s: float = RateMeter.WINDOW_S
    idle_rate_age_s: float = 0.2
    floor_bytes_per_s: int = 64 * KIB
    floor_age_s: float = 3.0
    floor_factor: float = 4.0
    dead_bytes_per_s: int = 1 * KIB
    kill_factor: float = 2.0
    least_kill_s: float = 2.0
    most_kill_s: float = 10.0
    read_timeout_s: float = 20.0
    crowd_factor: float = 3.0
    probe_s: float = 4.0

    @classmethod
    def within(cls, read_timeout_s: float) -> SlowPolicy:
        """The rules where sockets give up after ``read_timeout_s`` of silence: always sooner."""
        plain = cls()
        most_kill_s = min(plain.most_kill_s, read_timeout_s / 2)
        return cls(
            unknown_late_s=min(plain.unknown_late_s, read_timeout_s / 4),
            least_kill_s=min(plain.least_kill_s, most_kill_s),
            most_kill_s=most_kill_s,
            probe_s=min(plain.probe_s, read_timeout_s / 4),
            read_timeout_s=read_timeout_s,
        )

    def judge(
        self,
        now_s: float,
        flight: Flight,
        observed: Observed,
        *,
        idle: bool,
        crowd: Crowd | None = None,
    ) -> Verdict:
        """What to do with an attempt.

        Args:
            idle: nothing waits in the queue and connections are idle: a hedge costs no one's place.
            crowd: the other attempts; without it each is judged alone.
        """
        if crowd is not None and crowd.overslept:
            return Verdict.WAIT
        silent_s = now_s - flight.last_progress_s
        is_young = now_s - flight.started_s < min(self.rate_age_s, self.floor_age_s)
        if is_young and not idle and silent_s < min(self.least_late_s, self.read_timeout_s):
            return Verdict.WAIT  # as most of them: the rest costs more
        late_s, kill_s = self._bounds_s(flight, observed, idle, crowd)
        if silent_s >= kill_s or self._below_floor(now_s, flight, crowd):
            return Verdict.KILL
        if flight.hedged:
            return Verdict.WAIT
        if silent_s >= late_s or self._is_slow(now_s, flight, observed, idle, crowd):
            return Verdict.HEDGE
        return Verdict.WAIT

    def _bounds_s(
        self, flight: Flight, observed: Observed, idle: bool, crowd: Crowd | None
    ) -> tuple[float, float]:
        """From how long a silence on it is hedged, and ended."""
        late_s = self._late_s(flight, observed, idle)
        waits_for_head = flight.first_byte_s is None
        if crowd is not None and crowd.is_one and not waits_for_head:
            # A slice takes everybody long on a slow link; after a while, a few may try.
            late_s = max(late_s, min(self.crowd_factor * crowd.silence_s, self.probe_s))
        kill_s = self.kill_factor * late_s
        if not flight.hedged:
            kill_s = max(kill_s, self.least_kill_s)
        served_s = crowd.served_s if crowd is not None and crowd.is_one else math.inf
        if waits_for_head and flight.started_s > served_s:
            # Nobody who began no earlier has been served: a few may try.
            kill_s = self.most_kill_s
            late_s = max(late_s, self.unknown_late_s)
        kill_s = min(kill_s, self.most_kill_s) * 2.0 ** min(flight.kills, 30)
        return late_s, min(kill_s, self.read_timeout_s)

    def _late_s(self, flight: Flight, observed: Observed, idle: bool) -> float:
        """How long a silence may be, by what was observed."""
        first_byte_s = observed.first_byte_s(95)
        body_s_per_byte = observed.body_s_per_byte(95)
        if first_byte_s is None or body_s_per_byte is None:
            return self.unknown_late_s
        usual_s = first_byte_s
        if flight.first_byte_s is not None:
            slice_bytes = min(self.progress_bytes, flight.size_bytes)
            usual_s = max(usual_s, slice_bytes * body_s_per_byte)
        if idle:
            return max(self.idle_least_late_s, self.idle_late_factor * usual_s)
        return max(self.least_late_s, self.late_factor * usual_s)

    def _below_floor(self, now_s: float, flight: Flight, crowd: Crowd | None) -> bool:
        # Nothing at all is a silence, which has rules of its own.
        if flight.first_byte_s is None or not flight.rate_bytes_per_s:
            return False
        floor_bytes_per_s = float(self.floor_bytes_per_s)
        if crowd is not None and crowd.is_one and crowd.rate_bytes_per_s is not None:
            # A slow link divided by many is no reason to begin again and again.
            fair_bytes_per_s = max(
                crowd.rate_bytes_per_s / self.floor_factor, self.dead_bytes_per_s
            )
            floor_bytes_per_s = min(floor_bytes_per_s, fair_bytes_per_s)
        body_age_s = now_s - flight.started_s - flight.first_byte_s
        return body_age_s >= self.floor_age_s and flight.rate_bytes_per_s < floor_bytes_per_s

    def _is_slow(
        self,
        now_s: float,
        flight: Flight,
        observed: Observed,
        idle: bool,
        crowd: Crowd | None,
    ) -> bool:
        """Whether a fresh request would be done clearly before this one, by its rate."""
        rate_bytes_per_s = flight.rate_bytes_per_s
        body_s_per_byte = observed.body_s_per_byte(50)
        missing_bytes = flight.size_bytes - flight.received_bytes
        fresh_s = observed.expected_s(missing_bytes)
        # Nothing at all is a silence, which has rules of its own.
        if flight.first_byte_s is None or not rate_bytes_per_s or missing_bytes <= 0:
            return False
        if fresh_s is None or body_s_per_byte is None:
            return False
        least_age_s = self.idle_rate_age_s if idle else self.rate_age_s
        least_age_s = max(least_age_s, 2 * self.progress_bytes * body_s_per_byte)
        if now_s - flight.started_s - flight.first_byte_s < least_age_s:
            return False
        if crowd is not None and crowd.is_one and crowd.rate_bytes_per_s is not None:
            # What was observed may be of a time when the link was faster.
            fresh_s = max(fresh_s, missing_bytes / max(crowd.rate_bytes_per_s, 1.0))
        own_s = missing_bytes / rate_bytes_per_s
        if idle:
            return own_s > self.idle_slow_factor * fresh_s + self.idle_gain_s
        return own_s > self.slow_factor * fresh_s + self.slow_gain_s


class HedgeBudget:
    """Bounds what hedges may cost: bytes that come twice, and how many run at once.

    What running hedges ask for, plus what was received twice so far, stays within the greater of
    ``floor_bytes`` and ``share`` of the bytes delivered.

    Args:
        share: of the bytes delivered.
        floor_bytes: for the start of a load, and for small ones.
        at_once: hedges in flight.
    """

    def __init__(
        self, *, share: float = 0.05, floor_bytes: int = 32 * MIB, at_once: int = 8
    ) -> None:
        self._share = share
        self._floor_bytes = floor_bytes
        self._at_once = at_once
        self._running = 0
        self._exposed_bytes = 0
        self._wasted_bytes = 0

    def __repr__(self) -> str:
        return (
            f"HedgeBudget({self._running} running, {self._exposed_bytes} bytes exposed, "
            f"{self._wasted_bytes} wasted)"
        )

    @property
    def wasted_bytes(self) -> int:
        """Bytes that hedging received twice so far."""
        return self._wasted_bytes

    def try_take(self, missing_bytes: int, delivered_bytes: int) -> bool:
        """Whether a hedge for so many bytes may begin; if so, `settle` it when the race is over."""
        limit_bytes = max(self._floor_bytes, self._share * delivered_bytes)
        spent_bytes = self._exposed_bytes + self._wasted_bytes
        if self._running >= self._at_once or spent_bytes + missing_bytes > limit_bytes:
            return False
        self._running += 1
        self._exposed_bytes += missing_bytes
        return True

    def settle(self, missing_bytes: int, wasted_bytes: int) -> None:
        """A race is over.

        Args:
            missing_bytes: as given to `try_take`.
            wasted_bytes: what was received twice.
        """
        self._running -= 1
        self._exposed_bytes -= missing_bytes
        self._wasted_bytes += wasted_bytes
