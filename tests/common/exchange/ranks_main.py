"""``python -m tests.common.exchange.ranks_main``: runs ranks as processes, one job for each line.

This process imports all that a load needs, once, and forks the ranks of each job from itself, so
that a job costs no start of an interpreter. A job is JSON on standard input, its outcome JSON on
standard output:

    {"size": 2, "uri": "...", "directory": "...", "settings": {...},
     "rank_settings": {"1": {...}}, "environ": {...}, "slow": {"1": 0.01},
     "signal": {"1": [9, 0.2]}, "stop_in_trace": [1], "eager": [1],
     "fail": {"1": "layers.0.norm"}, "limit_s": 60, "write_all": true, "half_empty_disk": true}

``signal`` sends a signal to a rank so many seconds after the first one began to trace (stopped
ranks are continued 2 s later); ``stop_in_trace`` lets a rank do nothing any more in its trace;
``slow`` lets a rank sleep before it gives back each chunk; with ``write_all`` a rank ends when its
node cache is written, and with ``half_empty_disk`` the machine's disk is taken for half empty.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fastload_common.config import load_settings
from fastload_common.exchange.node_exchange import NodeExchange
from fastload_common.load.session import LoadSession, RankPlace, WeightSource
from fastload_common.range_cache.writer import finish_writes
from tests.common.exchange.exchange_harness import FileGroup, SlicedModel
from tests.common.range_cache.half_empty import half_empty

_CONTINUE_S = 2.0


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job: start its ranks, disturb them, wait for all; how each ended."""
    directory = Path(job["directory"])
    pids = {}
    for rank in range(job["size"]):
        pid = os.fork()
        if not pid:
            _be(rank, job, directory)
        pids[pid] = rank
    due = {int(rank): list(row) for rank, row in job.get("signal", {}).items()}
    ended: dict[int, dict[str, Any]] = {}
    end_s = time.monotonic() + job.get("limit_s", 60)
    began_s: float | None = None
    hit_s: float | None = None
    while len(ended) < job["size"]:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now_s = time.monotonic()
        if pid:
            ended[pids[pid]] = {"status": os.waitstatus_to_exitcode(status), "ended_s": now_s}
            continue
        if now_s > end_s:
            for pid, rank in pids.items():
                if rank not in ended:
                    os.kill(pid, signal.SIGKILL)
            end_s = now_s + 60
        if began_s is None and (directory / "began").exists():
            began_s = now_s
        for rank, (number, after_s) in list(due.items()):
            if began_s is not None and now_s >= began_s + after_s:
                del due[rank]
                if rank not in ended:
                    os.kill(next(p for p, r in pids.items() if r == rank), number)
                    hit_s = now_s if number == signal.SIGKILL else hit_s
                    if number == signal.SIGSTOP:
                        due[rank] = [signal.SIGCONT, after_s + _CONTINUE_S]
        time.sleep(0.002)
    # When a killed one was gone indeed: a busy machine lets it run once more to die.
    gone_s = [row["ended_s"] for row in ended.values() if row["status"] == -signal.SIGKILL]
    for rank, row in ended.items():
        path = directory / f"result.{rank}"
        row["result"] = json.loads(path.read_text()) if path.exists() else None
        row["hit_s"], row["gone_s"] = hit_s, max(gone_s, default=None)
    return {"ranks": [ended[k] for k in range(job["size"])], "hit": hit_s is not None}


def _be(rank: int, job: dict[str, Any], directory: Path) -> None:
    """Be one rank; does not return."""
    status = 3
    try:
        logging.basicConfig(
            filename=directory / f"log.{rank}",
            level=logging.INFO,
            format="%(relativeCreated)d %(threadName)s %(message)s",
            force=True,
        )
        os.environ.update(job.get("environ", {}))
        result = _load(rank, job, directory)
        draft = directory / f"result.draft.{rank}"
        draft.write_text(json.dumps(result))
        draft.rename(directory / f"result.{rank}")
        status = 0 if result["error"] is None else 1
    except BaseException:
        (directory / f"crash.{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _load(rank: int, job: dict[str, Any], directory: Path) -> dict[str, Any]:
    size = job["size"]
    extra = {**job["settings"], **job.get("rank_settings", {}).get(str(rank), {})}
    settings = load_settings({"progress": "off", **extra}, {})
    if job.get("half_empty_disk"):
        os.statvfs = half_empty(os.statvfs)  # type: ignore[assignment]
    model = SlicedModel(rank, size)
    model.fail_at = job.get("fail", {}).get(str(rank))
    model.error = KeyError("a weight loader of an engine")
    slow_s = job.get("slow", {}).get(str(rank), 0.0)
    if slow_s:
        _slow_down(slow_s)
    group = FileGroup(directory, rank, size)
    place = RankPlace("test", "1", rank, size, rank, size)
    error: BaseException | None = None
    session = LoadSession([WeightSource(job["uri"])], settings, place, group=group)
    began = directory / "began"

    def consume(weights: Any) -> Any:
        began.touch()
        if rank in job.get("stop_in_trace", []):
            time.sleep(60)
        return model.load_weights(weights)

    try:
        with session:
            eager = "a test" if rank in job.get("eager", []) else None
            session.load(None, consume, eager_reason=eager)
    except BaseException as caught:
        error = caught
    failed_s = time.monotonic()
    if job.get("write_all"):
        finish_writes(30)
    faults = None if error is not None else model.faults(_truth(job["truth"]))
    return {
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "faults": faults,
        "failed_s": failed_s,
        "report": session.report.as_dict(),
        "threads": sorted(_threads()),
        "descriptors": _descriptors(),
    }


def _threads() -> Iterator[str]:
    import threading

    for thread in threading.enumerate():
        if thread.name.startswith("fastload"):
            yield thread.name


def _descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if "fastload-staging" in target or target.startswith(("socket:", "anon_inode:[eventfd")):
            found.append(target)
    return found


def _slow_down(seconds: float) -> None:
    fetch = NodeExchange.fetch

    def slowly(self: NodeExchange) -> Iterator[Any]:
        for chunk in fetch(self):
            time.sleep(seconds)
            yield chunk

    NodeExchange.fetch = slowly  # type: ignore[method-assign]


def _truth(directory: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in Path(directory).glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


if __name__ == "__main__":
    main()
