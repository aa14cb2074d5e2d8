"""Progress: who shows what, and exact lines on an injected clock."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable

import pytest

from fastload_common.errors import ConfigError
from fastload_common.load.progress import LINE_INTERVAL_S, make_progress
from fastload_common.units import MIB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ScriptedClock:
    """Each wait is one step of a script, run in the waiting thread; then the wait blocks."""

    def __init__(self, steps: list[Callable[[], object]]) -> None:
        self.steps = steps
        self.now_s = 0.0
        self.waits_s: list[float] = []
        self.script_done = threading.Event()

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    def process_cpu_s(self) -> float:
        return 0.0

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not self.steps:
            self.script_done.set()
            return event.wait()
        self.waits_s.append(timeout_s)
        self.now_s += timeout_s
        self.steps.pop(0)()
        return False


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_lines_show_bytes_speed_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    ready = threading.Event()
    clock = ScriptedClock([ready.wait, lambda: progress.advance(50 * MIB), lambda: None])
    with caplog.at_level(logging.INFO):
        progress = make_progress("lines", 200 * MIB, 0, clock)
        progress.advance(50 * MIB)
        ready.set()
        assert clock.script_done.wait(30)
        progress.close()
    assert clock.waits_s == [LINE_INTERVAL_S] * 3
    assert lines(caplog) == [
        "Loading weights (fastload): 50.0 MiB of 200.0 MiB, 5 MB/s, ETA 30 s",
        "Loading weights (fastload): 100.0 MiB of 200.0 MiB, 5 MB/s, ETA 20 s",
        "Loading weights (fastload): 100.0 MiB of 200.0 MiB, 0 MB/s, ETA 30 s",
    ]


def test_lines_without_a_byte_yet_or_without_a_total(caplog: pytest.LogCaptureFixture) -> None:
    for total_bytes in (MIB, 0):
        clock = ScriptedClock([lambda: None])
        with caplog.at_level(logging.INFO):
            progress = make_progress("lines", total_bytes, 0, clock)
            assert clock.script_done.wait(30)
            progress.close()
    assert lines(caplog) == [
        "Loading weights (fastload): 0 B of 1.0 MiB, 0 MB/s, ETA unknown",
        "Loading weights (fastload): 0 B, 0 MB/s, 10 s so far",
    ]


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    before = threading.active_count()
    progress = make_progress("lines", MIB, 0)
    assert threading.active_count() == before + 1
    progress.close()
    progress.close()
    assert threading.active_count() == before


def test_auto_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    progress = make_progress("auto", 2 * MIB, 0, stream=stream)
    progress.advance(2 * MIB)
    progress.close()
    progress.close()
    assert "Loading weights (fastload): 100%" in stream.getvalue()
    assert "2.00M/2.00M" in stream.getvalue()


def test_auto_is_no_bar_in_a_pipe() -> None:
    stream = io.StringIO()
    progress = make_progress("auto", 2 * MIB, 0, stream=stream)
    progress.advance(2 * MIB)
    progress.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("mode", "rank"), [("off", 0), ("auto", 1), ("bar", 1), ("lines", 3)])
def test_nothing_is_shown(mode: str, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    before = threading.active_count()
    progress = make_progress(mode, MIB, rank, stream=stream)
    progress.advance(MIB)
    assert threading.active_count() == before
    progress.close()
    assert stream.getvalue() == ""
    assert not caplog.records


def test_a_closed_stream_is_no_terminal() -> None:
    stream = Terminal()
    stream.close()
    progress = make_progress("auto", MIB, 0, stream=stream)
    progress.close()


def test_a_terminal_that_goes_away_does_not_end_the_load() -> None:
    class Gone(Terminal):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError("terminal gone")
            return super().write(text)

    stream = Gone()
    progress = make_progress("bar", 10 * MIB, 0, stream=stream)
    stream.broken = True
    for _ in range(10):
        progress.advance(MIB)
    progress.close()


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="unknown progress mode 'fancy'"):
        make_progress("fancy", MIB)
