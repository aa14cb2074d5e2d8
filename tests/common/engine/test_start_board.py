"""How the processes of one start tell each other about its compile cache."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.start_board import RankReport, StartBoard, added
from fastload_common.testing.fake_clock import FakeClock

WARM = RankReport(is_warm=True, waited_s=0.25, counted=Counted(1, 2, 3.5, {"hit": 2}))
COLD = RankReport(is_warm=False, waited_s=0.25, counted=Counted())


def from_other_processes(board: StartBoard, *reports: RankReport) -> None:
    """As if other ranks had said it: a file is named by the process."""
    for number, report in enumerate(reports):
        board.report(report)
        own = board.path / f"rank-{os.getpid()}.json"
        own.rename(board.path / f"rank-other{number}.json")


def test_ranks_wait_until_artefacts_are_in_place(tmp_path: Path) -> None:
    clock = FakeClock()
    board = StartBoard.create(tmp_path, clock)
    waited: list[float] = []
    rank = threading.Thread(
        target=lambda: waited.append(StartBoard(board.path, clock).wait_restored(60.0))
    )
    rank.start()
    clock.wait_for_waiters(1)
    board.tell_restored()
    clock.advance(0.02)
    rank.join(10)
    assert waited == [pytest.approx(0.02)]
    assert StartBoard(board.path, clock).wait_restored(60.0) == 0.0
    board.tell_restored()  # once more does no harm


def test_ranks_do_not_wait_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = StartBoard.create(tmp_path, FakeClock(auto=True))
    assert board.wait_restored(5.0) == pytest.approx(5.0, abs=0.05)
    assert "not restored after 5 s" in caplog.text


def test_nobody_waits_in_a_start_that_is_gone(tmp_path: Path) -> None:
    assert StartBoard(tmp_path / "gone", FakeClock()).wait_restored(60.0) == 0.0


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    board = StartBoard.create(tmp_path)
    board.report(COLD)
    board.report(WARM)  # of the same process: instead of the first
    assert board.reports() == [WARM]


def test_a_report_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    board = StartBoard.create(tmp_path)
    for name, text in (("1", "{"), ("2", "[]"), ("3", json.dumps({"is_warm": True}))):
        (board.path / f"rank-{name}.json").write_text(text)
    board.report(WARM)
    assert board.reports() == [WARM]


def test_all_ranks_are_collected(tmp_path: Path) -> None:
    clock = FakeClock()
    board = StartBoard.create(tmp_path, clock)
    from_other_processes(board, COLD, WARM)
    found: list[list[RankReport]] = []
    parent = threading.Thread(target=lambda: found.append(board.collect(2, threading.Event())))
    parent.start()
    clock.wait_for_waiters(1)
    assert found == []
    from_other_processes(board, WARM)
    clock.advance(0.5)
    parent.join(10)
    assert found == [[WARM, WARM]]


def test_a_rank_that_never_gets_warm_is_not_awaited_for_ever(tmp_path: Path) -> None:
    clock = FakeClock(auto=True)
    board = StartBoard.create(tmp_path, clock)
    from_other_processes(board, WARM, COLD)
    begun_s = clock.monotonic_s()
    assert board.collect(2, threading.Event()) == [WARM, COLD]
    assert clock.monotonic_s() - begun_s == pytest.approx(60.0)


def test_collecting_ends_when_it_is_told_to(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    board = StartBoard.create(tmp_path)
    from_other_processes(board, COLD)
    assert board.collect(2, stop) == [COLD]


def test_a_start_removes_itself_and_what_old_ones_left(tmp_path: Path) -> None:
    old, young = StartBoard.create(tmp_path), StartBoard.create(tmp_path)
    old.report(WARM)
    now_s = young.path.stat().st_mtime
    os.utime(old.path, (now_s, now_s - 90_000))
    os.utime(young.path, (now_s, now_s - 80_000))
    (tmp_path / "inductor").mkdir()
    board = StartBoard.create(tmp_path)
    assert set(tmp_path.iterdir()) == {young.path, board.path, tmp_path / "inductor"}
    board.report(WARM)
    board.remove()
    board.remove()
    assert not board.path.exists()


def test_artefacts_that_nobody_counts_are_counted_by_their_directories() -> None:
    before = [("triton", "a/kernel.cubin"), ("inductor", "x/1.py")]
    after = [
        *before,
        ("triton", "b/kernel.cubin"),
        ("triton", "b/kernel.json"),
        ("triton", "c/kernel.cubin"),
        ("flashinfer", "op/op.so"),
        ("inductor", "y/2.py"),
    ]
    assert added(before, after, ["inductor"]) == {"flashinfer": 1, "triton": 2}
    assert added(after, after, []) == {}
