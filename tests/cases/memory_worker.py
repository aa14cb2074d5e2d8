"""Loads a model in a process of its own, and says how much memory that took. Not a test itself.

    python memory_worker.py JSON    {"uri": "...", "measured": [["stream", "lazy"]], ...}

prints a JSON list: by how many bytes this process grew in each load at most.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fastload_common.config import load_settings
from fastload_common.load.session import LoadSession, WeightSource

Weights = Iterable[tuple[str, torch.Tensor]]


def resident_bytes(field: str) -> int:
    """``VmRSS`` now, or ``VmHWM``: the most since it was forgotten."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def forget_the_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Consumer:
    """Takes tensors in one of the ways of engines.

    ``copy`` fills parameters that exist already, one after the other; ``stream`` looks at each
    and drops it; ``drain`` takes all before it looks at the first; ``drain-copy`` fills
    parameters after that.
    """

    def __init__(self, kind: str, shapes: dict[str, list[int]]) -> None:
        self.kind = kind
        self.digests: dict[str, str] = {}
        wanted = shapes if "copy" in kind else {}
        self.parameters = {name: torch.ones(*sizes) for name, sizes in wanted.items()}

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in list(weights) if "drain" in self.kind else weights:
            if self.parameters:
                self.parameters[name].copy_(tensor)
            else:
                self.digests[name] = digest(tensor)

    def finish(self) -> dict[str, str]:
        return self.digests | {name: digest(value) for name, value in self.parameters.items()}


def digest(tensor: torch.Tensor) -> str:
    array: Any = tensor.numpy()
    return hashlib.sha256(array).hexdigest()


def load(uri: str, settings: dict[str, Any], consumer: Consumer) -> LoadSession:
    with LoadSession([WeightSource(uri)], load_settings(settings, {})) as session:
        session.load(None, consumer.load_weights)
    return session


def measure(job: dict[str, Any], kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    consumer = Consumer(kind, job["shapes"])
    gc.collect()
    before_bytes = resident_bytes("VmRSS")
    forget_the_peak()
    session = load(job["uri"], settings, consumer)
    return {
        "grown_bytes": resident_bytes("VmHWM") - before_bytes,
        "digests": consumer.finish(),
        "peak_staging_bytes": session.report.peak_staging_bytes,
    }


def main(job: dict[str, Any]) -> list[dict[str, Any]]:
    # What the first load of a process costs once (imports, threads) is not the model's.
    load(job["warm_uri"], job["settings"], Consumer("stream", {}))
    return [
        measure(job, kind, job["settings"] | {"trace": trace}) for kind, trace in job["measured"]
    ]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
