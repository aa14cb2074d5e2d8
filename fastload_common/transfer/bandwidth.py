"""A cap on the bytes asked for per second. Pure: time is an argument."""

from __future__ import annotations

from fastload_common.units import KIB

__all__ = ["TokenBucket", "capped_part_bytes"]

# Requests that each take so long at the capped rate keep the flow even.
_PART_S = 0.25
_STEP_BYTES = 64 * KIB


def capped_part_bytes(bytes_per_s: float, part_bytes: int) -> int:
    """How large one request may be under a cap: a multiple of 64 KiB, not above ``part_bytes``."""
    even_bytes = int(bytes_per_s * _PART_S) // _STEP_BYTES * _STEP_BYTES
    return max(1, min(part_bytes, max(even_bytes, _STEP_BYTES)))


class TokenBucket:
    """A true cap: within any time, at most rate x time + burst bytes are asked for.

    A request larger than the burst may begin once so many bytes have been saved up; the burst is
    then that request.

    Args:
        bytes_per_s: the rate; above 0.
        burst_bytes: what may be saved up while nothing is asked.
        now_s: the bucket is full at this time.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: int, now_s: float) -> None:
        if bytes_per_s <= 0 or burst_bytes < 0:
            raise ValueError(f"a bucket of {burst_bytes} bytes at {bytes_per_s} bytes/s")
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._tokens_bytes = float(burst_bytes)
        self._at_s = now_s

    def __repr__(self) -> str:
        return f"TokenBucket({self._tokens_bytes:.0f} bytes at {self._at_s:.3f} s)"

    def delay_s(self, now_s: float, size_bytes: int) -> float:
        """How long a request for so many bytes must wait; 0: it may begin now."""
        missing_bytes = size_bytes - self._saved_bytes(now_s, size_bytes)
        # Less than a byte is rounding.
        return missing_bytes / self._bytes_per_s if missing_bytes >= 1 else 0.0

    def take(self, now_s: float, size_bytes: int) -> None:
        """A request begins; if it did not wait, the next ones wait for it too."""
        self._tokens_bytes = self._saved_bytes(now_s, size_bytes) - size_bytes
        self._at_s = max(now_s, self._at_s)

    def give_back(self, size_bytes: int) -> None:
        """So many bytes that were taken will not come: their request ended early."""
        self._tokens_bytes = min(self._tokens_bytes + size_bytes, float(self._burst_bytes))

    def _saved_bytes(self, now_s: float, size_bytes: int) -> float:
        elapsed_s = max(0.0, now_s - self._at_s)
        most_bytes = max(self._burst_bytes, size_bytes)
        return min(float(most_bytes), self._tokens_bytes + elapsed_s * self._bytes_per_s)
