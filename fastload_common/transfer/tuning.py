"""The policies of one load, together with what they have seen so far."""

from __future__ import annotations

import random as random_module
from collections.abc import Callable
from dataclasses import dataclass, field

from fastload_common.clock import Clock
from fastload_common.transfer.bandwidth import TokenBucket
from fastload_common.transfer.hedging import HedgeBudget, SlowPolicy
from fastload_common.transfer.observed import Observed
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.sizing import Ramp
from fastload_common.transfer.throttle import Throttle
from fastload_common.units import MIB

__all__ = ["Tuning", "make_tuning"]

# What hedges may cost at the start of a load, before a share of what it has received is more.
_HEDGED_CHUNKS = 4
_MOST_HEDGED_BYTES = 32 * MIB


@dataclass(slots=True)
class Tuning:
    """Everything that decides when what is asked for. One load's, used by one thread.

    Attributes:
        bucket: the cap on bytes asked for per second; None: no cap.
        random: draws from ``[0, 1)``.
    """

    policy: TransferPolicy
    slow: SlowPolicy
    throttle: Throttle
    ramp: Ramp
    hedges: HedgeBudget
    bucket: TokenBucket | None = None
    observed: Observed = field(default_factory=Observed)
    random: Callable[[], float] = random_module.random

    @property
    def limit(self) -> int:
        """Requests that may be on the wire now."""
        # A cut of a maximum that nobody uses would be none.
        self.throttle.set_maximum(self.ramp.target)
        return max(1, self.throttle.limit)

    @property
    def backlog(self) -> int:
        """Requests that may wait for a connection, so that none idles while we are slow."""
        return max(1, self.limit // 4)


def make_tuning(
    policy: TransferPolicy, clock: Clock, random: Callable[[], float] = random_module.random
) -> Tuning:
    """The policies at the beginning of a load."""
    start = min(policy.start_concurrency or policy.concurrency, policy.concurrency)
    bucket = None
    if policy.max_bytes_per_s is not None:
        bucket = TokenBucket(policy.max_bytes_per_s, policy.burst_bytes, clock.monotonic_s())
    return Tuning(
        policy=policy,
        slow=SlowPolicy.within(policy.read_timeout_s),
        throttle=Throttle(policy.concurrency),
        ramp=Ramp(start, policy.concurrency),
        hedges=HedgeBudget(
            floor_bytes=max(
                policy.burst_bytes, min(_MOST_HEDGED_BYTES, _HEDGED_CHUNKS * policy.burst_bytes)
            )
        ),
        bucket=bucket,
        random=random,
    )
