"""Starts of a server on a node with a compile cache, and workers in processes of their own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload_common.clock import SystemClock
from fastload_common.compile_cache.lifecycle import CompileCache, Outcome
from fastload_common.config import Settings
from tests.common.compile_cache.artefacts import (
    FACTORS,
    TREES,
    package,
    read_trees,
    write_trees,
)
from tests.house.tree import ROOT

BOUND_BYTES = 1 << 24


def started(
    settings: Settings, place: Path, factors: dict[str, Any], limit_s: float = 60
) -> Outcome:
    """One start below a directory: restore; compile if that was a miss; publish."""
    cache = CompileCache.open(settings, SystemClock())
    assert cache is not None
    roots = {name: place / name for name in TREES}
    outcome = cache.restore({**FACTORS, **factors}, roots)
    if outcome.status == "hit":
        assert read_trees(roots) == TREES
    else:
        assert not any(root.exists() for root in roots.values()), "a part was left"
        write_trees(place)
    cache.publish(outcome, roots)
    assert cache.close(limit_s)
    return outcome


class Node:
    """One node: a directory for the cache, and starts of a server on it."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.cache = tmp_path / "cache"
        self._scratch = tmp_path / "starts"
        self._starts = 0
        self.settings = Settings(
            compile_cache=(str(self.cache),), compile_cache_max_bytes=BOUND_BYTES, **settings
        )

    def start(self, **factors: Any) -> Outcome:
        """Restore; compile if that was a miss; publish."""
        self._starts += 1
        place = self._scratch / str(self._starts)
        return started(self.settings, place, factors)

    @property
    def entry(self) -> Path:
        return self.cache / "v1" / "entries" / package({}).manifest.key

    def leftovers(self) -> list[Path]:
        return list((self.cache / "v1" / "drafts").iterdir())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def worker(*arguments: object, prefix: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.cases.cache_worker", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **more,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"stderr": done.stderr}


def spawn(*arguments: object) -> subprocess.Popen[str]:
    """A worker that runs on; its first line is awaited."""
    command = [sys.executable, "-m", "tests.cases.cache_worker", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline()
    return process
