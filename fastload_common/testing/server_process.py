"""The end of a server that tests have started as a program of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

__all__ = ["end_server"]


def end_server(process: subprocess.Popen[bytes] | None, directory: Path | None) -> None:
    """End it with all processes of its session, and remove its directory.

    Args:
        process: leader of a session; its standard input is closed here.
        directory: its own.
    """
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
