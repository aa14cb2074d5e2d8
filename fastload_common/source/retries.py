"""Attempts of small calls: list, stat, put, read of a header. Not for the ranges of a load.

One policy for what goes through botocore and what goes over our own connections.
"""

from __future__ import annotations

import random
import threading

from fastload_common.clock import Clock
from fastload_common.errors import FastloadError

__all__ = ["wait_or_raise"]

# Full jitter below 0.1, 0.2, 0.4 ... s.
_FIRST_CEILING_S = 0.1
_LONGEST_S = 5.0
# A wrong or dead endpoint must be told soon: at most about 1.5 s of waiting here (and as many
# connect timeouts). What throttles for longer meets the ranges' more patient policy.
_MOST_ATTEMPTS = 5


def wait_or_raise(error: FastloadError, attempt: int, max_attempts: int, clock: Clock) -> None:
    """After a failed attempt: wait before the next one, or raise the error if there is none.

    Args:
        attempt: which one failed, from 1.
        max_attempts: the setting; small calls stop at 5 at the latest.
    """
    if not error.retryable or attempt >= min(max_attempts, _MOST_ATTEMPTS):
        error.fields["attempts"] = attempt
        raise error
    ceiling_s = min(_LONGEST_S, _FIRST_CEILING_S * 2 ** (attempt - 1))
    asked_s = float(error.fields.get("retry_after_s", 0.0))
    clock.wait(threading.Event(), min(_LONGEST_S, max(asked_s, random.uniform(0, ceiling_s))))
