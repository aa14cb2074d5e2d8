"""From S3 into GPU memory: how near to the slower of the two links, and beside whom.

    python -m benchmarks.gpu [--device cuda] [--out FILE] [--limit-s 440]
    python -m benchmarks.gpu --device cpu --scale small      (no GPU: shows that it works)
    python -m benchmarks.gpu --device fake --scale small     (the GPU's path on a recorded device)

Needs torch and what fastload needs, no engine; Run:ai Model Streamer where it is installed. Two
ranks share the one GPU, as a node's ranks share a link: each holds its half of a model of 8 GiB,
divided along dim 0, along dim 1, of many small tensors (which each rank has all of), or mixed as in
a transformer: see `gpu_models`.

Rates are bytes of parameters on the GPU, of all ranks, by the time from the first rank's start to
the last one's end. Every byte is checked. Limits: what one pinned buffer brings to the device, and
what processes receive on the loopback that do nothing else. ``plain`` reads files that lie in this
machine's page cache: it has no network.

Bars: fastload reaches 90 % of the smaller limit for dim-0 and dim-1; peak of GPU memory is at most
the parameters + 1 %; peak of host memory above what it was before at most the budget + 5 %. Without
a GPU there are no bars.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost import memory_bytes
from benchmarks.gpu_models import KINDS, PERIOD_WORDS, File, files_of, pattern
from benchmarks.gpu_store import BUCKET, Store, receive_limit
from benchmarks.results import Bar, machine
from fastload_common.config import environment
from fastload_common.units import GIB, MIB

SIZES = {"full": 8 * GIB, "small": 96 * MIB}
BUDGET_BYTES = {"full": 2 * GIB, "small": 64 * MIB}
CLIENTS = ("fastload", "runai", "plain")
LEAST_SHARE, MOST_GPU, MOST_HOST = 0.9, 1.01, 1.05
_RUN_LIMIT_S = 120.0
_SAMPLE_EVERY_S = 0.2

Row = dict[str, Any]


def load(store: Store, job: Row, ranks: int, budget_bytes: int, *, sampled: bool) -> Row:
    """One load by all ranks.

    Raises:
        RuntimeError: a rank failed; the text is its last line.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.clients.gpu_rank"]
    processes = [
        subprocess.Popen(
            [*command, json.dumps({**job, "rank": rank, "ranks": ranks, "meeting_port": port})],
            env=_environment(store, budget_bytes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    stop = threading.Timer(_RUN_LIMIT_S, _kill, (processes,))
    stop.start()
    try:
        ready = [_line(process) == "ready" for process in processes]
        sampler = _Sampler(sampled)
        if all(ready):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
        said = [process.communicate() for process in processes]
        peak_bytes = sampler.stop()
    finally:
        stop.cancel()
        _kill(processes)
        for process in processes:
            process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError((errors.strip() or "killed").splitlines()[-1][:300])
    return _row([json.loads(text.strip().splitlines()[-1]) for text, _ in said], peak_bytes)


def _row(found: list[Row], host_peak_bytes: int | None) -> Row:
    wall_s = max(row["ended_s"] for row in found) - min(row["began_s"] for row in found)
    total_bytes = sum(row["parameter_bytes"] for row in found)
    row: Row = {
        "gib_per_s": total_bytes / wall_s / GIB,
        "wall_s": wall_s,
        "cpu_s": sum(one["cpu_s"] for one in found),
        "parameter_bytes": total_bytes,
    }
    if found[0]["gpu_peak_bytes"] is not None:
        row["gpu_peak_ratio"] = sum(one["gpu_peak_bytes"] for one in found) / total_bytes
    if host_peak_bytes is not None:
        row["host_peak_bytes"] = host_peak_bytes
    if "phases_s" in found[0]:
        names = ("phases_s", "devices", "requests", "retries", "node", "fetched_bytes")
        row["ranks"] = [{name: one[name] for name in names} for one in found]
    return row


def _kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class _Sampler:
    """Looks at the memory of this process's descendants."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._before = self._peak = memory_bytes(os.getpid()) if wanted else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if wanted:
            self._thread.start()

    def stop(self) -> int | None:
        """The most above what it was at first; None where it was not asked for."""
        if not self._wanted:
            return None
        self._stop.set()
        self._thread.join()
        return self._peak - self._before

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_EVERY_S):
            self._peak = max(self._peak, memory_bytes(os.getpid()))


def _environment(store: Store, budget_bytes: int) -> dict[str, str]:
    """The variables of a rank: the store's, and none of the caller's that would change it."""
    url = f"http://127.0.0.1:{store.port}"
    kept = {
        name: value
        for name, value in environment().items()
        if not name.startswith(("AWS_", "FASTLOAD_", "RUNAI_"))
        and not name.lower().endswith("_proxy")
    }
    return kept | {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "RUNAI_STREAMER_S3_ENDPOINT": url,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "FASTLOAD_MEMORY_BYTES": str(budget_bytes),
        "FASTLOAD_PROGRESS": "off",
    }


def write_files(files: Sequence[File], directory: str) -> None:
    """The files themselves, for who reads files."""
    words = pattern()
    for file in files:
        with open(Path(directory) / file.name, "wb") as target:
            target.write(file.header)
            left = file.size_bytes - len(file.header)
            while left:
                left -= target.write(memoryview(words)[: min(left, 8 * PERIOD_WORDS)])


def device_limit(device: str, size_bytes: int) -> Row:
    """What is copied to the device in a second, from one pinned buffer; runs in this process."""
    import torch

    if device != "cuda":
        source, target = (
            torch.ones(size_bytes, dtype=torch.uint8),
            torch.empty(size_bytes, dtype=torch.uint8),
        )
        began_s = time.monotonic()
        target.copy_(source)
        rate = size_bytes / (time.monotonic() - began_s) / GIB
        return {"gib_per_s": rate, "of": "a copy in host memory", "device": "none"}
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: --device fake --scale small shows that all else works")
    source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.monotonic()
        for _ in range(16):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(16 * size_bytes / (time.monotonic() - began_s) / GIB)
    name = torch.cuda.get_device_name()
    return {"gib_per_s": max(rates), "of": "pinned memory to the GPU", "device": name}


def _limit_in_a_process(device: str) -> Row:
    """So that this process has no torch, and no memory on the device."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--only-limit", "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run(options: argparse.Namespace) -> Row:
    """All limits and rows, as far as the time goes."""
    began_s = time.monotonic()
    size_bytes, budget_bytes = SIZES[options.scale], BUDGET_BYTES[options.scale]
    cpus = len(os.sched_getaffinity(0))
    found: Row = {
        "device": options.device,
        "ran_on_a_gpu": options.device == "cuda",
        "note": "" if options.device == "cuda" else "this has not run on a GPU",
        "model_bytes": size_bytes,
        "ranks": options.ranks,
        "budget_bytes": budget_bytes,
        "store_processes": max(1, cpus // 4),
        "limits": {"to_device": _limit_in_a_process(options.device)},
        "rows": [],
    }
    for kind in options.kinds:
        files = files_of(kind, size_bytes)
        with Store(files, found["store_processes"]) as store:
            if "receive" not in found["limits"]:
                counts = sorted({max(1, cpus // 4), max(1, cpus // 2)})
                found["limits"]["receive"] = receive_limit(store, files, counts)
            _run_kind(options, kind, files, store, found, began_s)
    found["seconds"] = time.monotonic() - began_s
    return found


def _run_kind(
    options: argparse.Namespace,
    kind: str,
    files: Sequence[File],
    store: Store,
    found: Row,
    began_s: float,
) -> None:
    # What is judged comes first and again; peers once; memory is looked at in a load of its own.
    turns = [("fastload", False)] * options.rounds + [("fastload", True)]
    turns += [(client, False) for client in CLIENTS[1:]]
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as directory:
        for client, sampled in turns:
            if client not in options.clients:
                continue
            row: Row = {"kind": kind, "client": client, "memory_sampled": sampled}
            found["rows"].append(row)
            if client == "runai" and importlib.util.find_spec("runai_model_streamer") is None:
                row["skipped"] = "not installed"
                continue
            if time.monotonic() - began_s > options.limit_s:
                row["skipped"] = f"no time: {options.limit_s:.0f} s are over"
                continue
            if client == "plain":
                write_files(files, directory)
            job = {
                "client": client,
                "kind": kind,
                "size_bytes": found["model_bytes"],
                "device": options.device,
                "directory": directory,
            }
            try:
                row |= load(store, job, options.ranks, found["budget_bytes"], sampled=sampled)
            except RuntimeError as error:
                row["failed"] = str(error)
            print(_said(row), file=sys.stderr, flush=True)


def _said(row: Row) -> str:
    rate = f"{row['gib_per_s']:.2f} GiB/s" if "gib_per_s" in row else row.get("failed", "")
    return f"{row['kind']:6} {row['client']:8} {rate}"


def bars_of(found: Row) -> list[Bar]:
    """What is judged; nothing without a GPU."""
    if not found["ran_on_a_gpu"]:
        return []
    rates = found["limits"]["receive"].values()
    smaller = min(found["limits"]["to_device"]["gib_per_s"], max(rates))
    own = [row for row in found["rows"] if row["client"] == "fastload"]
    bars = []
    for kind in ("dim-0", "dim-1"):
        rows = [row for row in own if row["kind"] == kind and not row["memory_sampled"]]
        failed = next((row["failed"] for row in rows if "failed" in row), None)
        done = [row["gib_per_s"] / smaller for row in rows if "gib_per_s" in row]
        value = statistics.median(done) if done else None
        name = f"{kind}: share of the smaller limit"
        bars.append(Bar(name, value, LEAST_SHARE, at_least=True, failed=failed))
    gpu = [row["gpu_peak_ratio"] for row in own if "gpu_peak_ratio" in row]
    host = [row["host_peak_bytes"] for row in own if "host_peak_bytes" in row]
    bars.append(Bar("GPU memory, by its parameters", max(gpu, default=None), MOST_GPU))
    peak = max(host) / found["budget_bytes"] if host else None
    bars.append(Bar("host memory, by its budget", peak, MOST_HOST))
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu", "fake"), default="cuda")
    parser.add_argument("--scale", choices=SIZES, default="full")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="loads of fastload for each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--limit-s", type=float, default=340, help="begin no load after this")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--only-limit", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_limit:
        print(json.dumps(device_limit(options.device, 256 * MIB)))
        return 0
    found = run(options)
    bars = bars_of(found)
    found["bars"] = [{"name": bar.name, "text": str(bar), "pass": bar.passed} for bar in bars]
    found["bucket"], found["machine"] = BUCKET, machine()
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return int(
        any(bar.passed is False for bar in bars) or any("failed" in r for r in found["rows"])
    )


if __name__ == "__main__":
    sys.exit(main())
