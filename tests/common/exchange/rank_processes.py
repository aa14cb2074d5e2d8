"""Runs jobs of `ranks_main` from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["RankProcesses"]

_ROOT = Path(__file__).parents[3]


class RankProcesses:
    """A process that forks ranks. A context manager; one job at a time."""

    def __enter__(self) -> Self:
        foreign = ("AWS_", "FASTLOAD_")
        environ = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.common.exchange.ranks_main"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def run(self, directory: Path, uri: str, size: int, truth: Path, **job: Any) -> dict[str, Any]:
        """Load by so many ranks; see `ranks_main` for the job.

        Args:
            directory: a new one, for what the ranks write.
            truth: the checkpoint's files.
        """
        directory.mkdir(parents=True, exist_ok=True)
        row = {
            "size": size,
            "uri": uri,
            "directory": str(directory),
            "truth": str(truth),
            "settings": {"chunk_bytes": "64KiB", "memory_bytes": "4MiB"},
            **job,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(row) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks ranks has ended"
        found: dict[str, Any] = json.loads(answer)
        for rank in range(size):
            crash = directory / f"crash.{rank}"
            assert not crash.exists(), crash.read_text()
        return found
