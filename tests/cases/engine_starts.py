"""Starts of the real vLLM with torch.compile on one node whose disk can be wiped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastload_common.clock import SystemClock
from fastload_common.compile_cache.lifecycle import CompileCache, Outcome
from fastload_common.config import Settings
from fastload_common.testing.vllm_cpu import add_vllm_metadata
from tests.cases.engine_process import ROOT

__all__ = ["Node", "Start"]

WORKER = ROOT / "tests" / "vllm" / "serving_worker.py"
_COMPILERS = ("g++", "gcc", "cc", "c++", "clang", "clang++", "nvcc", "ptxas", "hipcc", "ninja")
_SCRIPT = """#!/bin/sh
echo "$0 $*" >> '{calls}'
PATH='{path}' exec "$(basename "$0")" "$@"
"""


@dataclass(frozen=True, slots=True)
class Start:
    """What one start was: tokens, its line in the report, its log, and what it left.

    Attributes:
        compilers: command lines of compilers that made something.
        left: files in the home and temporary directories, by their names from there.
    """

    tokens: list[Any]
    report: dict[str, Any]
    log: str
    compilers: list[str]
    left: list[str]


class Node:
    """The node.

    Attributes:
        cache: fastload's directory on the disk.
        entries: of the compile cache; not on the disk that is wiped.
        inductor: on the disk; the operator has set it.
    """

    def __init__(self, directory: Path) -> None:
        self._disk = directory / "disk"
        self.cache = self._disk / "cache"
        self.entries = directory / "entries"
        self.inductor = self._disk / "inductor"
        self._report = directory / "report"
        self._calls = directory / "calls"
        programs = directory / "bin"
        programs.mkdir(parents=True)
        script = _SCRIPT.format(calls=self._calls, path=os.environ["PATH"])
        for name in filter(shutil.which, _COMPILERS):
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)
        names = add_vllm_metadata(directory / "names")
        self.variables = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{names}{os.pathsep}{ROOT}",
            "HOME": str(self._disk / "home"),
            "TMPDIR": str(self._disk / "tmp"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.inductor),
            "FASTLOAD_CACHE_DIR": str(self.cache),
            "FASTLOAD_COMPILE_CACHE": str(self.entries),
            "FASTLOAD_REPORT": str(self._report),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # What this build saves ahead of time it cannot load.
            "VLLM_USE_AOT_COMPILE": "0",
        }

    def wipe(self) -> None:
        """An empty disk: home, temporary files and fastload's directory are gone."""
        shutil.rmtree(self._disk)

    def start(self, variables: Mapping[str, str] | None = None, **engine: Any) -> Start:
        """Start, generate and end."""
        for name in ("HOME", "TMPDIR"):
            Path(self.variables[name]).mkdir(parents=True, exist_ok=True)
        self._calls.write_text("")
        done = subprocess.run(
            [sys.executable, str(WORKER), json.dumps({"engine": engine, "reload": []})],
            env=_without_torchs_own(os.environ) | self.variables | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=550,
        )
        results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert results, done.stdout[-5000:]
        lines = [json.loads(line) for line in self._report.read_text().splitlines()]
        calls = self._calls.read_text().splitlines()
        return Start(
            json.loads(results[-1].removeprefix("RESULT ")),
            [line for line in lines if line.get("kind") == "compile_cache"][-1],
            done.stdout,
            [call for call in calls if " -o " in call or " -c " in call],
            sorted(self._left()),
        )

    def forget(self) -> None:
        """Nothing of what was compiled is left, but in a directory that the operator has set."""
        shutil.rmtree(self.entries)
        shutil.rmtree(self.cache)

    def make_useless(self, scratch: Path) -> None:
        """Put something else under the key of the one entry, as valid as what was there."""
        settings = Settings(compile_cache=(str(self.entries),))
        cache = CompileCache.open(settings, SystemClock())
        assert cache is not None
        assert cache.stores.node is not None
        (manifest,) = cache.stores.node.manifests()
        scratch.mkdir()
        (scratch / "nothing").write_text("that the engine looks for")
        outcome = Outcome("miss", manifest.key, factors=manifest.factors)
        cache.publish(outcome, {"inductor": scratch}, replace=True)
        assert cache.close(60)
        assert set(outcome.published.values()) == {"stored"}, outcome

    def _left(self) -> list[str]:
        return [
            path.relative_to(self._disk).as_posix()
            for name in ("HOME", "TMPDIR")
            for path in Path(self.variables[name]).rglob("*")
            if path.is_file()
        ]


def _without_torchs_own(environ: Mapping[str, str]) -> dict[str, str]:
    """torch sets some when it is imported, as it is by these tests."""
    names = ("TORCHINDUCTOR_", "TRITON_")
    return {name: value for name, value in environ.items() if not name.startswith(names)}
