"""One server of the storm, seen from outside: its words, its warnings, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.house.tree import ROOT

__all__ = ["ServerProcess"]

_ANY_S = 2.5
"""A start takes about as long; a kill at ``any`` moment comes within it."""
_AFTER_S = 0.05
"""A kill at a named moment comes as long after it at most."""
_WARNING = re.compile(r"^fastload: (.*)$", re.MULTILINE)
_PARTICULAR = re.compile(r"s3://\S+|/\S+|[0-9a-f]{12,}|[0-9]+")


class ServerProcess:
    """Starts at once.

    Args:
        container: its own disk.
        variables: of the cache.
        job: see `compile_server.serve`.
    """

    def __init__(
        self,
        container: Path,
        variables: Mapping[str, str],
        job: dict[str, Any],
    ) -> None:
        job["fallback"] = str(container / "own")
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "FASTLOAD_", "STORM_", "TORCHINDUCTOR_"))
        }
        environ |= {
            **variables,
            "FASTLOAD_CACHE_DIR": str(container / "cache"),
            "TMPDIR": str(container),
            "HOME": str(container),
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.compile_server", json.dumps(job)],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[dict[str, Any]] = []
        self._errors: list[str] = []
        self._news = threading.Condition()
        self._is_over = False
        self._threads = [
            threading.Thread(target=task, daemon=True) for task in (self._listen, self._note)
        ]
        for thread in self._threads:
            thread.start()

    def kill_at(self, moment: str, share: float) -> str:
        """Kill it at one of `MOMENTS`, or after some part of a start; what it was killed at.

        Args:
            share: of the longest delay.
        """
        if moment == "any":
            self._wait_for(None, share * _ANY_S)
        elif self._wait_for(moment, 30):
            threading.Event().wait(share * _AFTER_S)
        last = self._lines[-1]["at"] if self._lines else "its start"
        self._process.send_signal(signal.SIGKILL)
        return str(last)

    @property
    def was_killed(self) -> bool:
        return self._process.returncode == -signal.SIGKILL

    def end(self, limit_s: float) -> dict[str, Any]:
        """Wait for its end; what it said last, its status and its warnings."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGABRT)
            self._process.wait()
        for thread in self._threads:
            thread.join(limit_s)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        stderr = "".join(self._errors)
        told = [_PARTICULAR.sub("*", text)[:90] for text in _WARNING.findall(stderr)]
        last = self._lines[-1] if self._lines and self._lines[-1]["at"] == "end" else {}
        return {**last, "status": self._process.returncode, "warnings": told, "stderr": stderr}

    def _wait_for(self, moment: str | None, limit_s: float) -> bool:
        """Until it has said so, or has ended; False where it has not."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or self._has_said(moment), limit_s)
            return self._has_said(moment)

    def _has_said(self, moment: str | None) -> bool:
        return any(line["at"] == moment for line in self._lines)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with self._news:
                self._lines.append(json.loads(text))
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _note(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)
