"""Time, injected. The only module that may call `time.monotonic` and `time.sleep`."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the rest of fastload may know of time."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch (UTC)."""
        ...

    def process_cpu_s(self) -> float:
        """CPU seconds (user and system) of this process and its ended children so far."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for the event at most timeout_s; True if it was set."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def process_cpu_s(self) -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(timeout_s)
