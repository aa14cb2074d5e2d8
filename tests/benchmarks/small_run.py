"""A benchmark as its user starts it, with little work."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

__all__ = ["small_run"]


def small_run(name: str, *options: str, timeout_s: float = 500) -> tuple[int, dict[str, Any]]:
    """Its exit status and what it printed as JSON; it complains of nothing."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, found
