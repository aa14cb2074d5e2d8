"""Starts the rig as a process of its own and talks to it, so that it takes no GIL of the client's.

with RigProcess("--object", "models/a=1GiB", "--first-byte-ms", "30") as rig:
    run_client(rig.environ)
    print(rig.ask("stats")["bytes_sent"])
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from fastload_common.config import environment
from fastload_common.errors import ConfigError
from fastload_common.testing.rig.fault_json import dump_faults
from fastload_common.testing.rig.faults import Fault

__all__ = ["RigProcess"]


class RigProcess:
    """One such process. A context manager; it ends with its owner, however that one ends.

    Args:
        arguments: of the command line.

    Attributes:
        port, endpoint, environ: as of `Rig`, once started; ``environ`` has AWS_CA_BUNDLE too,
            with TLS.
        pid: of the process, for its CPU time.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.pid = 0
        self.endpoint = ""
        self.environ: dict[str, str] = {}

    def start(self) -> None:
        """Start it and wait until it serves.

        Raises:
            ConfigError: it ended at once; why stands on its standard error, which is ours.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastload_common.testing.rig", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in environment().items() if name[:4] != "AWS_"},
        )
        self.pid = self._process.pid
        try:
            hello = self._read()
        except BaseException:
            self.stop()
            raise
        self.port, self.endpoint, self.environ = hello["port"], hello["endpoint"], hello["environ"]

    def stop(self) -> None:
        """End it and wait. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()

    def ask(self, command: str) -> Any:
        """Give one command (stats, log, clear, release, faults, link) and return its answer.

        Raises:
            ConfigError: the rig does not take it, or has ended.
        """
        if self._process is None or self._process.stdin is None:
            raise ConfigError("the rig is not running")
        print(command, file=self._process.stdin, flush=True)
        answer = self._read()
        if isinstance(answer, dict) and set(answer) == {"error"}:
            raise ConfigError(answer["error"])
        return answer

    def arrange(self, faults: Iterable[Fault]) -> None:
        """See `Rig.arrange`."""
        self.ask(f"faults {dump_faults(faults)}")

    def _read(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("the rig has ended", exit_status=self._process.wait())
        return json.loads(line)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
