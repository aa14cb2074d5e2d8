"""A process with the real engine in it, which answers calls one after the other.

Importing vLLM takes seconds, so all cases share one. Its side is `engine_worker`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["EngineProcess"]

WORKER = Path(__file__).with_name("engine_worker.py")
ROOT = Path(__file__).parents[2]
_SHOWN_CHARACTERS = 6000


class EngineProcess:
    """Calls functions of ``tests.cases`` inside vLLM. Use as a context manager.

    Args:
        directory: for its log and its reports.
        environ: more variables, such as those of a store.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self.log = directory / "engine.log"
        self._report = directory / "report.jsonl"
        self._more = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "FASTLOAD_CACHE_DIR": str(directory / "cache"),
            "FASTLOAD_REPORT": str(self._report),
            "FASTLOAD_PROGRESS": "off",
            # Each rank of a case is alone in its process: there is nobody to share with.
            "FASTLOAD_EXCHANGE": "off",
            "PYTHONPATH": str(ROOT),
            **environ,
        }
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; the next call starts another."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()
        self._process = None

    def call(self, function: str, *, limit_s: float = 240.0, **arguments: Any) -> Any:
        """Call ``module:function`` of ``tests.cases`` and return what it returned.

        Raises:
            AssertionError: it raised, or the process ended or took too long; with its output.
        """
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(limit_s, process.kill)
        watch.start()
        try:
            process.stdin.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            watch.cancel()
            watch.join()
        if not answer:
            self.stop()
            raise AssertionError(f"the engine's process ended: {self._end_of_log()}")
        found = json.loads(answer)
        assert "raised" not in found, found["raised"]
        return found["returned"]

    def _start(self) -> subprocess.Popen[str]:
        with self.log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, str(WORKER)],
                env=os.environ | self._more,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def _end_of_log(self) -> str:
        return self.log.read_text()[-_SHOWN_CHARACTERS:]
