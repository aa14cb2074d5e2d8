"""How many requests a store that says "slow down" may get. Pure: time is an argument.

Each request backs off on its own (`TransferPolicy.backoff_delay_s`), but its connection would at
once ask for something else. So the load as a whole has to slow down too.
"""

from __future__ import annotations

import math

__all__ = ["Throttle"]

# A cut needs this long to show: requests in flight, and their replies.
_INTERVAL_S = 1.0
# The share of refusals is an average over about so many replies.
_MEMORY = 16
# Refusals of fewer replies tell nothing, and such a share of them is nearly all.
_FEW = 4
_ALMOST_ALL = 0.75
# Full speed is back after so many seconds without a refusal.
_RECOVERY_S = 8.0
# A store that refuses everything is asked again after 1, 2, 4 ... at most so many seconds.
_LONGEST_PAUSE_S = 8.0
_LONGEST_RETRY_AFTER_S = 60.0


class Throttle:
    """Concurrency that refusals lower and success raises again: AIMD, with a pause.

    The cut is by half when a quarter of the replies or more are refusals, and less below that:
    one refusal in a hundred must not take half of the speed. It comes at most once a second. When
    nearly every reply is a refusal, nothing new is asked for a second, and twice as long
    each time that no success comes in between.

    Args:
        maximum: the limit without refusals; at least 1.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = max(1, maximum)
        self._limit = float(self._maximum)
        self._refused_share = 0.0
        self._replies = 0
        self._cut_s = -math.inf
        self._raised_s = -math.inf
        self._pauses_in_vain = 0
        self._resume_s = -math.inf

    def __repr__(self) -> str:
        return f"Throttle({self.limit} of {self._maximum}, {self._refused_share:.0%} refused)"

    @property
    def limit(self) -> int:
        """Requests that may be in flight: from 1 to the maximum."""
        return max(1, int(self._limit))

    def delay_s(self, now_s: float) -> float:
        """How long nothing new should be asked; 0: go on."""
        return max(0.0, self._resume_s - now_s)

    def throttled(self, now_s: float, retry_after_s: float | None = None) -> None:
        """A request was refused (503, 429, SlowDown).

        Args:
            retry_after_s: what the server asked for; heeded when nearly every reply is one.
        """
        self._reply(refused=True)
        self._raised_s = now_s
        if now_s - self._cut_s >= _INTERVAL_S:
            self._cut_s = now_s
            self._limit = max(1.0, self._limit * (1 - min(0.5, 2 * self._refused_share)))
        if self._replies < _FEW or self._refused_share < _ALMOST_ALL:
            return
        if now_s >= self._resume_s:
            pause_s = min(_INTERVAL_S * 2.0**self._pauses_in_vain, _LONGEST_PAUSE_S)
            self._pauses_in_vain = min(self._pauses_in_vain + 1, 30)
            self._resume_s = now_s + pause_s
        if retry_after_s is not None:
            asked_s = min(max(retry_after_s, 0.0), _LONGEST_RETRY_AFTER_S)
            self._resume_s = max(self._resume_s, now_s + asked_s)

    def succeeded(self, now_s: float) -> None:
        """A request was served."""
        self._reply(refused=False)
        self._pauses_in_vain = 0
        if self._limit < self._maximum:
            # After a long silence this must not leap.
            elapsed_s = min(max(now_s - self._raised_s, 0.0), _INTERVAL_S)
            self._limit = min(
                float(self._maximum), self._limit + self._maximum * elapsed_s / _RECOVERY_S
            )
        self._raised_s = now_s

    def set_maximum(self, maximum: int) -> None:
        """Change the limit without refusals; a lowered limit goes on from where it is.

        Keep it at what would be in flight otherwise: half of a maximum that nobody uses is no cut.
        """
        was_free = self._limit >= self._maximum
        self._maximum = max(1, maximum)
        self._limit = float(self._maximum) if was_free else min(self._limit, float(self._maximum))

    def _reply(self, *, refused: bool) -> None:
        self._replies = min(self._replies + 1, _MEMORY)
        self._refused_share += (refused - self._refused_share) / self._replies
