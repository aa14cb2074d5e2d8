"""``fastload plan`` is stopped, or one of its ranks fails: nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fastload_common.errors import EngineUnsupportedError
from fastload_common.load.dry_ranks import trace_ranks
from fastload_common.load.plan_job import PlanJob, Tracer
from tests.common.cli.plan_engine import Engine, Prepared, write_model

pytestmark = [
    pytest.mark.torch,
    # Where a fork beside threads is warned of (Python 3.12), the tests' servers are meant.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

LONG_SECONDS = 300
PATIENCE_SECONDS = 60


class Hanging(Engine):
    """Each rank says its process, and that of its parent, in a directory, and goes on for long.

    Args:
        directory: for the files.
        failing: a rank that fails as soon as another one is there.
    """

    def __init__(self, directory: Path, failing: int | None = None) -> None:
        super().__init__()
        self.directory, self.failing = directory, failing

    def prepare(self, job: PlanJob) -> Prepared:
        return HangingRanks(self, job)


class HangingRanks(Prepared):
    engine: Hanging

    def trace(self, rank: int, tracer: Tracer) -> None:
        if rank == self.engine.failing:
            until(lambda: any(self.engine.directory.iterdir()))
            raise ValueError("this rank fails")
        half = self.engine.directory.parent / f"half{rank}"
        half.write_text(f"{os.getpid()} {os.getppid()}")
        half.rename(self.engine.directory / str(rank))
        time.sleep(LONG_SECONDS)


def until(reached: Callable[[], bool]) -> None:
    """Wait for something that other processes do."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has reaped yet has, too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    directory = tmp_path / "told"
    directory.mkdir()
    return directory


PROGRAM = """
import signal
import sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may be run by nohup
from importlib import metadata
from pathlib import Path
from fastload_common.cli import plan
from fastload_common.cli.main import main
from tests.common.cli.test_plan_stops import Hanging
plan._planner = lambda name: Hanging(Path(sys.argv[2]))
sys.exit(main(["plan", sys.argv[1], "--tp", "2"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_command_leaves_nothing(
    number: signal.Signals, told: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model), str(told)],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        until(lambda: command.poll() is not None or any(told.iterdir()))
        pids = [int(pid) for file in told.iterdir() for pid in file.read_text().split()]
        command.send_signal(number)
        code = command.wait(PATIENCE_SECONDS)
    finally:
        command.kill()
        command.wait()
    assert len(pids) >= 2
    until(lambda: all(gone(pid) for pid in pids))
    if number is signal.SIGKILL:
        assert code == -number  # its directory it could not take along
    else:
        assert code == 128 + number
        assert list(temporary.iterdir()) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two ranks at a time")
def test_a_failing_rank_takes_the_others_with_it(told: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with pytest.raises(EngineUnsupportedError, match="this rank fails"):
        trace_ranks(Hanging(told, failing=0), PlanJob(str(model), 2))
    [other] = told.iterdir()
    rank, engine = map(int, other.read_text().split())
    assert gone(rank)
    assert gone(engine)
