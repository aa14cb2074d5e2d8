"""A limit in bytes per second, for one connection or for the link that all share."""

from __future__ import annotations

import threading

__all__ = ["Pace"]

# So much lateness of the sender's timer is made good later.
_CREDIT_S = 0.02


class Pace:
    """Hands out the instants at which pieces have crossed a line of this rate. Thread-safe.

    Args:
        bytes_per_s: of the line.
        now_s: any clock's present.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"{bytes_per_s} bytes per second")
        self.bytes_per_s = bytes_per_s
        self._free_s = now_s
        self._lock = threading.Lock()

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Queue a piece behind those before it; returns when its last byte is through."""
        with self._lock:
            begin_s = max(self._free_s, now_s - _CREDIT_S)
            self._free_s = begin_s + size_bytes / self.bytes_per_s
            return self._free_s
