"""The processes of a sweep: one a rank, started together, told the same, ended together."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]


START_S = 600.0
"""For a rank to start: mostly imports, which take minutes where a machine has better to do."""


class RanksLostError(RuntimeError):
    """A rank crashed or did not answer in time; all of them are gone."""


class Ranks:
    """As many ranks as asked for. Use as a context manager.

    Args:
        world_size: how many.
        directory: for their logs and reports.
        module: what each of them runs.
    """

    def __init__(self, world_size: int, directory: Path, module: str = "tests.sweep.rank") -> None:
        self.world_size = world_size
        self._module = module
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self  # they start with the first question

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(self, command: dict[str, Any], timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Tell all ranks the same, and wait for all answers.

        Raises:
            RanksLostError: as it says. The next question finds new ranks.
        """
        if not self._processes:
            self._start()
        line = json.dumps(command) + "\n"
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            raise RanksLostError("a rank had ended") from None
        return self._answers(timeout_s)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes = []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            name = f"world{self.world_size}-rank{rank}"
            place = {"rank": rank, "world_size": self.world_size, "port": port}
            environ = os.environ | {
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "FASTLOAD_REPORT": str(self._directory / f"{name}.jsonl"),
            }
            with (self._directory / f"{name}.log").open("a") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", self._module, json.dumps(place)],
                        cwd=ROOT,
                        env=environ,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )
        self._answers(START_S)

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        end_s = time.monotonic() + timeout_s
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < self.world_size:
                ready = selector.select(max(0.0, end_s - time.monotonic()))
                if not ready:
                    self.stop()
                    raise RanksLostError(f"no answer in {timeout_s:.0f} s")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        code = self._processes[key.data].wait()
                        self.stop()
                        raise RanksLostError(f"rank {key.data} ended with code {code}")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self.world_size)]
