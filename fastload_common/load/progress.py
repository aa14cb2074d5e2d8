"""Progress of a load: a bar on a terminal, else a log line every ten seconds, or nothing.

Only rank 0 shows anything. `advance` may be called from any thread and costs next to nothing
between two updates; an error of the display never reaches the load.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Protocol, TextIO

from fastload_common.clock import Clock, SystemClock
from fastload_common.errors import ConfigError
from fastload_common.units import format_size

__all__ = ["LINE_INTERVAL_S", "Progress", "make_progress"]

logger = logging.getLogger(__name__)

DESCRIPTION = "Loading weights (fastload)"
LINE_INTERVAL_S = 10.0
"""Seconds between two log lines: rare enough for a log, often enough for a liveness watch."""


class Progress(Protocol):
    """What shows that the load goes on."""

    def advance(self, size_bytes: int) -> None:
        """Say that so many more bytes are placed. Safe from any thread."""
        ...

    def close(self) -> None:
        """End the display. Safe to call twice."""
        ...


def make_progress(
    mode: str,
    total_bytes: int,
    rank: int = 0,
    clock: Clock | None = None,
    stream: TextIO | None = None,
) -> Progress:
    """Choose the display.

    Args:
        mode: ``auto``, ``bar``, ``lines`` or ``off``, as the setting ``progress``.
        total_bytes: how many bytes this rank will place; 0 if not known.
        rank: every rank but 0 gets a silent one.
        clock: time; default: the machine's.
        stream: where the bar goes; default: standard error, as the engines' own bars.

    Returns:
        The display; the caller closes it.

    Raises:
        ConfigError: unknown mode.
    """
    if mode not in ("auto", "bar", "lines", "off"):
        raise ConfigError(f"unknown progress mode {mode!r}", hint="use auto, bar, lines or off")
    stream = stream if stream is not None else sys.stderr
    if mode == "off" or rank != 0:
        return _Silent()
    if mode == "auto":
        mode = "bar" if _is_terminal(stream) else "lines"
    if mode == "bar":
        return _Bar(total_bytes, stream)
    return _Lines(total_bytes, clock if clock is not None else SystemClock())


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no stream at all (a daemon), or a closed one
        return False


class _Silent:
    def advance(self, size_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Bar:
    """A bar of the kind that the engines' loaders show."""

    def __init__(self, total_bytes: int, stream: TextIO) -> None:
        from tqdm import tqdm

        self._lock = threading.Lock()
        self._bar = tqdm(
            total=total_bytes or None,
            desc=DESCRIPTION,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=stream,
            dynamic_ncols=True,
        )

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            try:
                self._bar.update(size_bytes)
            except OSError:  # the terminal went away
                self._bar.disable = True

    def close(self) -> None:
        with self._lock:
            try:
                self._bar.close()
            except OSError:
                self._bar.disable = True


class _Lines:
    """A log line with bytes, speed and the time that is left, every `LINE_INTERVAL_S`.

    Speed is that of the last interval, the time left is reckoned from the whole load: the
    first shows a stall, the second does not jump.
    """

    def __init__(self, total_bytes: int, clock: Clock) -> None:
        self._total_bytes = total_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._started_s = self._shown_s = clock.monotonic_s()
        self._shown_bytes = 0
        self._ended = threading.Event()
        # A load that hangs advances nothing; the line must come all the same.
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="fastload-progress", daemon=True
        )
        self._thread.start()

    def advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes

    def close(self) -> None:
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._clock.wait(self._ended, LINE_INTERVAL_S):
            self._show()

    def _show(self) -> None:
        now_s = self._clock.monotonic_s()
        with self._lock:
            done_bytes = self._done_bytes
        recent_s = now_s - self._shown_s
        recent = (done_bytes - self._shown_bytes) / recent_s if recent_s > 0 else 0.0
        self._shown_s, self._shown_bytes = now_s, done_bytes
        total = f" of {format_size(self._total_bytes)}" if self._total_bytes else ""
        logger.info(
            "%s: %s%s, %.0f MB/s, %s",
            DESCRIPTION,
            format_size(done_bytes),
            total,
            recent / 1e6,
            self._time_left(done_bytes, now_s - self._started_s),
        )

    def _time_left(self, done_bytes: int, elapsed_s: float) -> str:
        if not self._total_bytes:
            return f"{elapsed_s:.0f} s so far"
        if done_bytes <= 0:
            return "ETA unknown"
        left_bytes = max(self._total_bytes - done_bytes, 0)
        return f"ETA {left_bytes * elapsed_s / done_bytes:.0f} s"
