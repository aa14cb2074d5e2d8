"""Dry runs of all ranks of an engine, each in a process of its own.

The engine is imported and configured once, in a child; its ranks are forked from there, so that
each has the engine's global state to itself. Results come back as JSON files.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from fastload_common import errors
from fastload_common.errors import EngineUnsupportedError, FastloadError, SourceError
from fastload_common.load.plan_job import PlanJob, Planner, PreparedPlan, RankTrace
from fastload_common.ranges import ObjectId

__all__ = ["trace_ranks"]

_PACKED = ("needs", "exact")
_PR_SET_PDEATHSIG = 1
# What would end the parent; a child that is being born must not take them for its own.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Work = Callable[[], Mapping[str, Any]]
Say = Callable[[str], None]


def _silent(line: str) -> None:
    """Says nothing."""


def trace_ranks(
    planner: Planner, job: PlanJob, *, quiet: bool = True, say: Say = _silent
) -> list[RankTrace]:
    """What each rank of a layout would read. Reads headers and the engine's own files only.

    Args:
        quiet: keep what the engine says to itself, unless it fails.
        say: called with a line when something is done, in another process than this one, whose
            standard output and error are not those of this one.

    Raises:
        EngineUnsupportedError: the engine is not there, or cannot build this model here.
        FastloadError: any error of the checkpoint or of a setting.
    """
    planner.check()
    # A rank that is being killed may still write there.
    with tempfile.TemporaryDirectory(prefix="fastload-plan-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        log = directory / "log" if quiet else None
        child = _Child(directory / "engine", lambda: _all_ranks(planner, job, directory, say), log)
        try:
            child.result()
        except _Crashed as crash:
            raise EngineUnsupportedError(
                f"the engine failed while it built the model: {crash}",
                hint="would it serve the model so? its log, with --debug, says where it failed",
            ) from None
        return [_decoded(directory / f"rank{rank}") for rank in range(job.ranks)]


class _Crashed(Exception):
    """A child ended by something that is no error of ours; its text says what."""


class _Child:
    """A forked process that does one piece of work and writes its result to a file.

    It never outlives its parent, nor do its own children. Whoever made it calls `result` or `end`.
    """

    def __init__(self, path: Path, work: _Work, log: Path | None = None) -> None:
        self._path = path
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self._pid = os.fork()
            if not self._pid:
                _end_with(parent)
                _run(path, work, log, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def result(self) -> dict[str, Any]:
        """Wait for its end.

        Raises:
            FastloadError: that it ended with.
            _Crashed: any other.
        """
        try:
            _, status = os.waitpid(self._pid, 0)
        except BaseException:
            self.end()
            raise
        if not self._path.exists():
            raise _Crashed(f"it ended with status {os.waitstatus_to_exitcode(status)}")
        found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        if "crash" in found:
            raise _Crashed(found["crash"])
        if "error" in found:
            kind = getattr(errors, found["error"], FastloadError)
            raise kind(found["what"], hint=found["hint"], **found["fields"])
        return found

    def end(self) -> None:
        """Kill it, whatever it does, and wait until it is gone."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Linux only; else nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def _run(path: Path, work: _Work, log: Path | None, mask: Iterable[int]) -> NoReturn:
    """The child's life.

    Args:
        mask: signals to be blocked, once none leads to the parent's handlers.
    """
    try:
        for number in _STOPS[1:]:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        tempfile.tempdir = str(path.parent)  # what an engine leaves goes with all the rest
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if log is not None:
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(2, 1)  # engines log to standard output, where the plan belongs
        _write(path, work())
    except FastloadError as error:
        fields = {name: str(value) for name, value in error.fields.items()}
        kind = type(error).__name__
        _write(path, {"error": kind, "what": error.what, "hint": error.hint, "fields": fields})
    except _Crashed as crash:
        _write(path, {"crash": str(crash)})
    except BaseException as error:  # noqa: BLE001 - handed to the parent
        traceback.print_exc()
        _write(path, {"crash": f"{type(error).__name__}: {error}"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    half = path.with_suffix(".part")
    half.write_text(json.dumps(value), encoding="utf-8")
    half.rename(path)


def _all_ranks(planner: Planner, job: PlanJob, directory: Path, say: Say) -> dict[str, Any]:
    """In the engine's process: a fork for each rank, as many at a time as there are CPUs."""
    import torch

    from fastload_common.load.dry_run import DryTracer, open_model

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    say("the engine starts")
    prepared = planner.prepare(job)
    expected = prepared.expected_source()
    try:
        opened = {expected: open_model(expected, prepared.settings)}
    except SourceError:
        raise
    except FastloadError:
        opened = {}  # the model's own patterns may choose other files

    def one(rank: int) -> _Work:
        def work() -> dict[str, Any]:
            return _encoded(_trace(prepared, rank, DryTracer(prepared.settings, opened)))

        return work

    waiting = list(range(job.ranks))
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                rank = waiting.pop(0)
                running.append(_Child(directory / f"rank{rank}", one(rank)))
            running.pop(0).result()
            say(f"{job.ranks - len(waiting) - len(running)} of {job.ranks} ranks traced")
    finally:
        for child in running:
            child.end()
    return {}


def _trace(prepared: PreparedPlan, rank: int, tracer: Any) -> RankTrace:
    prepared.trace(rank, tracer)
    result = tracer.result
    assert isinstance(result, RankTrace)
    return result


def _encoded(trace: RankTrace) -> dict[str, Any]:
    packed = {name: base64.b64encode(getattr(trace, name)).decode() for name in _PACKED}
    return asdict(trace) | packed


def _decoded(path: Path) -> RankTrace:
    found = json.loads(path.read_text(encoding="utf-8"))
    return RankTrace(
        **found
        | {
            **{name: base64.b64decode(found[name]) for name in _PACKED},
            "objects": tuple(ObjectId(**each) for each in found["objects"]),
            "data_starts": tuple(found["data_starts"]),
            "notes": tuple(found["notes"]),
        }
    )
