"""An engine that compiles at once: files in two directories, each of which names its key."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastload_common.clock import Clock
from fastload_common.engine.cache_roots import CacheRoot
from fastload_common.engine.compile_counters import Counted
from fastload_common.engine.compile_start import CompileStart
from fastload_common.engine.compile_verdict import Verdict
from tests.common.compile_cache.artefacts import FACTORS

LAYOUT = (
    CacheRoot("graphs", ("ENGINE_CACHE",), "~/.cache/engine", below=("compiled", "kernels")),
    CacheRoot("inductor", ("TORCHINDUCTOR_CACHE_DIR",), "/tmp/torchinductor_{user}"),
    CacheRoot("nowhere", (), "~/.cache/nowhere"),
)
FILES = {
    "graphs": ("compiled/a.py", "compiled/deep/b.bin", "kernels/k.so"),
    "inductor": ("x/c.py",),
}
VARIABLES = {"graphs": "ENGINE_CACHE", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
COUNT = sum(map(len, FILES.values()))


class Server:
    """What stands on one machine: settings in variables, and servers that are started in turn.

    Args:
        place: its disk.
        uri: a prefix in S3.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, place: Path, uri: str = "", **settings: Any
    ) -> None:
        self.monkeypatch = monkeypatch
        self.place = place
        self.uri = uri
        self.node = place / "entries"
        self.cache = place / "cache"
        self.report = place / "report"
        self.settings = {
            "FASTLOAD_COMPILE_CACHE": ",".join(filter(None, (str(self.node), uri))),
            "FASTLOAD_CACHE_DIR": str(self.cache),
            "FASTLOAD_REPORT": str(self.report),
            "FASTLOAD_COMPILE_CACHE_DEADLINE_S": "60",
            **{f"FASTLOAD_{name.upper()}": str(value) for name, value in settings.items()},
        }
        place.mkdir(exist_ok=True)

    @contextmanager
    def process(self, variables: Mapping[str, str] | None = None) -> Iterator[None]:
        """The variables of a new process."""
        with self.monkeypatch.context() as patch:
            for variable in VARIABLES.values():
                patch.setenv(variable, "")  # so that it is unset again afterwards
                patch.delenv(variable)
            for name, value in {**self.settings, **(variables or {})}.items():
                patch.setenv(name, value)
            yield

    def begin(
        self, factors: Mapping[str, Any] | None = None, clock: Clock | None = None
    ) -> CompileStart | None:
        return CompileStart.begin(
            "engine", lambda: {**FACTORS, **(factors or {})}, LAYOUT, clock=clock
        )

    def start(
        self,
        factors: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> tuple[CompileStart, Verdict]:
        """A whole life: restore, compile what is missing, publish, end."""
        with self.process(variables):
            start = self.begin(factors)
            assert start is not None
            start.wait()
            verdict = start.complete([compile_all(factors)])
            assert start.finish(60)
            start.directories.close()
        assert verdict is not None
        return start, verdict

    def last_line(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report.read_text().splitlines()[-1])
        return found


def directory_of(root: str) -> Path:
    return Path(os.environ[VARIABLES[root]])


def content(factors: Mapping[str, Any] | None, name: str) -> bytes:
    return f"{sorted((factors or {}).items())} {name}".encode() * 50


def compile_all(
    factors: Mapping[str, Any] | None = None, *, cost_s: float = 2.0, ignore: bool = False
) -> Counted:
    """Use what is there, make what is not; what is there must be of these factors.

    Args:
        ignore: make all of it under other names, as an engine whose own key has changed.
    """
    made = found = 0
    for root, names in FILES.items():
        for name in names:
            path = directory_of(root) / (f"{name}-other" if ignore else name)
            if path.exists():
                assert path.read_bytes() == content(factors, name), f"{path} is of another key"
                found += 1
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(factors, name))
            made += 1
    return Counted(made, found, cost_s * made / COUNT, {"made": made} if made else {})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
