"""Looks at all attempts on the wire, every now and then, and says which are too slow."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fastload_common.transfer.hedging import Crowd, Verdict
from fastload_common.transfer.parts import Racer
from fastload_common.transfer.tuning import Tuning

__all__ = ["JUDGE_EVERY_S", "SILENT_S", "Judge"]

JUDGE_EVERY_S = 0.05
# Longer than it takes to be told of a byte: then none has come.
SILENT_S = 2 * JUDGE_EVERY_S


class Judge:
    """One load's. Time is an argument."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._crowd = Crowd()
        self._judged_s = -math.inf

    @property
    def next_s(self) -> float:
        """When it looks again; never, where slow requests are left alone."""
        return self._judged_s + JUDGE_EVERY_S if self._tuning.policy.hedging else math.inf

    def slow(
        self, racers: Iterable[Racer], now_s: float, *, idle: bool
    ) -> list[tuple[Racer, Verdict]]:
        """Those that something should be done about; empty before `next_s`.

        Args:
            idle: nothing waits to be asked for, and connections are idle.
        """
        if now_s < self.next_s:
            return []
        self._judged_s = now_s
        flights = [
            (racer, flight)
            for racer in racers
            if not racer.cancelled and (flight := racer.flight(now_s)) is not None
        ]
        self._crowd.look(now_s, [flight for _, flight in flights])
        slow, observed = self._tuning.slow, self._tuning.observed
        verdicts = [
            (racer, slow.judge(now_s, flight, observed, idle=idle, crowd=self._crowd))
            for racer, flight in flights
        ]
        return [(racer, verdict) for racer, verdict in verdicts if verdict is not Verdict.WAIT]
