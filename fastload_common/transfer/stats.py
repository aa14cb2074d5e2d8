"""What the requests of a load cost: counters and latency distributions, for the report."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import Any

from fastload_common.source.base import Receipt

__all__ = ["LatencyHistogram", "TransferStats"]

# Buckets grow by 5 %, so a percentile is right to 5 %: from 10 us to more than 3 hours.
_FIRST_BUCKET_S = 1e-5
_GROWTH = 1.05
_BUCKETS = 426


class LatencyHistogram:
    """Durations in logarithmic buckets: fixed memory, any number of samples. Not thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0
        self._max_s = 0.0

    def add(self, seconds: float) -> None:
        ratio = seconds / _FIRST_BUCKET_S
        bucket = 0 if ratio <= 1 else math.ceil(math.log(ratio, _GROWTH))
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self._total += 1
        self._max_s = max(self._max_s, seconds)

    def percentile_s(self, percent: float) -> float:
        """Upper bound of the bucket that holds the percentile; 0 without samples."""
        rank = math.ceil(self._total * percent / 100)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank and bucket < _BUCKETS - 1:
                return min(_FIRST_BUCKET_S * _GROWTH**bucket, self._max_s)
        return self._max_s  # the last bucket has no upper bound

    def snapshot(self) -> dict[str, float]:
        """``p50``, ``p90``, ``p99`` and ``max``, in seconds."""
        shown = {f"p{percent}": self.percentile_s(percent) for percent in (50, 90, 99)}
        return {name: round(value, 6) for name, value in {**shown, "max": self._max_s}.items()}


class TransferStats:
    """Counts of one load; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._retries = 0
        self._bytes_received = 0
        self._bytes_refetched = 0
        self._new_connections = 0
        self._hedges = 0
        self._hedges_won = 0
        self._hedge_bytes_wasted = 0
        self._kills = 0
        self._errors: Counter[str] = Counter()
        self._first_byte = LatencyHistogram()
        self._total = LatencyHistogram()

    def request_started(self, *, is_retry: bool) -> None:
        with self._lock:
            self._requests += 1
            self._retries += is_retry

    def request_done(self, receipt: Receipt, *, is_retry: bool) -> None:
        with self._lock:
            self._count_bytes(receipt.size_bytes, is_retry)
            self._new_connections += receipt.new_connection
            self._first_byte.add(receipt.first_byte_s)
            self._total.add(receipt.total_s)

    def request_failed(self, kind: str, received_bytes: int, *, is_retry: bool) -> None:
        """Count a failure, by the name of its error type, and the good bytes that came first."""
        with self._lock:
            self._count_bytes(received_bytes, is_retry)
            self._errors[kind] += 1

    def hedged(self) -> None:
        """A second request was sent for what a slow one had not brought."""
        with self._lock:
            self._hedges += 1

    def hedge_ended(self, wasted_bytes: int, *, won: bool) -> None:
        """A hedge is over; so many of its bytes had come by the other request too."""
        with self._lock:
            self._hedges_won += won
            self._hedge_bytes_wasted += wasted_bytes

    def killed(self) -> None:
        """A slow request was ended, to be sent again."""
        with self._lock:
            self._kills += 1

    def snapshot(self) -> dict[str, Any]:
        """The numbers so far, ready for JSON.

        ``requests`` (retries included), ``retries``, ``bytes_received`` (good bytes),
        ``bytes_refetched`` (those of them that a retry or hedge brought), ``new_connections``,
        ``hedges``, ``hedges_won``, ``hedge_bytes_wasted`` (received twice), ``kills``,
        ``first_byte_s`` and ``total_s`` (percentiles of successful requests), ``errors``
        (failed attempts by error type).
        """
        with self._lock:
            return {
                "requests": self._requests,
                "retries": self._retries,
                "bytes_received": self._bytes_received,
                "bytes_refetched": self._bytes_refetched,
                "new_connections": self._new_connections,
                "hedges": self._hedges,
                "hedges_won": self._hedges_won,
                "hedge_bytes_wasted": self._hedge_bytes_wasted,
                "kills": self._kills,
                "first_byte_s": self._first_byte.snapshot(),
                "total_s": self._total.snapshot(),
                "errors": dict(sorted(self._errors.items())),
            }

    def _count_bytes(self, size_bytes: int, is_retry: bool) -> None:
        self._bytes_received += size_bytes
        self._bytes_refetched += size_bytes if is_retry else 0
