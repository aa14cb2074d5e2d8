"""The real ``python -m sglang.launch_server`` on the CPU, started and ended for a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastload_common.testing import sglang_cpu
from fastload_common.testing.s3_server import free_port
from fastload_sglang.caches import ROOTS

START_DEADLINE_S = 400.0
END_DEADLINE_S = 10.0
PROMPT = [10, 20, 30, 40, 50]
ROOT = Path(__file__).parents[2]

NO_WARMUP = "--skip-server-warmup"


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        port: of 127.0.0.1.
        log: everything that its processes wrote.
        session: process session of all of them.
    """

    port: int
    log: Path
    session: int

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=200) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def tokens(self) -> list[int]:
        """Twelve greedy ones after a fixed prompt."""
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        answer = self.ask("/generate", {"input_ids": PROMPT, "sampling_params": sampling})
        return list(answer["output_ids"])

    def checksums(self) -> dict[str, str]:
        """Each parameter's checksum, computed by the engine; the name says rank and model."""
        answer = self.ask("/weights_checker", {"action": "checksum"})
        assert answer["success"], answer
        # The models of one rank are in one record; their parameters' names then tell which.
        return {
            f"{rank['parallelism_info'][0]['rank']} {name}": checksum
            for rank in answer["ranks"]
            for name, checksum in rank["checksums"].items()
        }

    def own_lines(self) -> list[str]:
        """What fastload wrote into the log."""
        text = self.log.read_text(errors="replace")
        return [
            line[line.index("fastload: ") :] for line in text.splitlines() if "fastload: " in line
        ]


def command(
    model: str, *arguments: str, port: int | None = None, warm_up: bool = False
) -> list[str]:
    where = ("--host", "127.0.0.1", "--port", str(port or free_port()))
    program = (sys.executable, "-m", "sglang.launch_server", "--model-path", model)
    skipped = () if warm_up else (NO_WARMUP,)
    return [*program, *where, *sglang_cpu.ARGUMENTS, *skipped, *arguments]


def environment(
    work: Path, variables: Mapping[str, str] | None = None, *, ranks: int = 1
) -> dict[str, str]:
    """Variables of a server whose caches are its own."""
    mine = {
        "SGLANG_CACHE_DIR": str(work / "sglang-cache"),
        "FASTLOAD_CACHE_DIR": str(work / "fastload-cache"),
        "PYTHONPATH": str(ROOT),
    }
    # What an import of the engine, in the tests' own process, has set for itself is nobody's wish.
    places = {name for root in ROOTS for name in root.variables}
    given = {name: value for name, value in os.environ.items() if name not in places}
    return {**given, **sglang_cpu.variables(ranks), **mine, **(variables or {})}


@contextlib.contextmanager
def serving(
    log: Path,
    variables: Mapping[str, str],
    model: str,
    *arguments: str,
    ranks: int = 1,
    warm_up: bool = False,
) -> Iterator[Server]:
    """A server that is up, with or without a warm-up request of its own; nothing of it is left."""
    port = free_port()
    before = shared_memory()
    wanted = command(model, *arguments, "--tp", str(ranks), port=port, warm_up=warm_up)
    with log.open("wb") as output:
        process = subprocess.Popen(
            wanted,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, port, log)
        yield Server(port, log, process.pid)
    finally:
        end(process)
        for segment in shared_memory() - before:
            segment.unlink(missing_ok=True)


def run(
    variables: Mapping[str, str], *arguments: str, timeout_s: float = 400.0
) -> tuple[int, str, list[str]]:
    """A server that is expected to end by itself: status, output, and what is left of it."""
    process = subprocess.Popen(
        list(arguments),
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        deadline_s = time.monotonic() + END_DEADLINE_S
        while members(process.pid) and time.monotonic() < deadline_s:
            time.sleep(0.1)  # the kernel takes its time with what was killed
        return process.returncode, output, members(process.pid)
    finally:
        end(process)
        if process.stdout is not None:
            process.stdout.close()


def end(process: subprocess.Popen[Any]) -> None:
    """End all of its session."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        deadline_s = time.monotonic() + 15
        while members(process.pid) and time.monotonic() < deadline_s:
            process.poll()
            time.sleep(0.1)
    process.wait()


def members(session: int) -> list[str]:
    """Living processes of a session: number and name."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(")")
        except OSError:  # ended meanwhile
            continue
        fields = rest.split()
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(head)
    return found


def shared_memory() -> set[Path]:
    """Segments that SGLang leaves behind when it is stopped."""
    return {path for name in ("sglang_*", "sgl_*") for path in Path("/dev/shm").glob(name)}


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30).close()
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            tail = log.read_text(errors="replace")[-6000:]
            raise AssertionError(f"the server is not up (status {process.poll()}):\n{tail}")
        time.sleep(0.5)
