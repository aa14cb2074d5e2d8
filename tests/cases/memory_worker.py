"""Loads a model in a process of its own, and says how much memory that took. Not a test itself.

    python memory_worker.py JSON    {"uri": "...", "consumer": "stream", "settings": {...}}

prints one JSON object: bytes before the load, at most while it ran, and its report.
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
    return hashlib.sha256(tensor.numpy()).hexdigest()


def main(job: dict[str, Any]) -> dict[str, Any]:
    consumer = Consumer(job["consumer"], job["shapes"])
    # What the first load of a process costs once (imports, threads) is not the model's.
    settings = load_settings({"progress": "off"} | job["settings"], {})
    with LoadSession([WeightSource(job["warm_uri"])], settings) as session:
        session.load(None, lambda weights: [digest(tensor) for _, tensor in weights])
    gc.collect()
    before_bytes = resident_bytes("VmRSS")
    forget_the_peak()
    with LoadSession([WeightSource(job["uri"])], settings) as session:
        session.load(None, consumer.load_weights)
    return {
        "before_bytes": before_bytes,
        "peak_bytes": resident_bytes("VmHWM"),
        "digests": consumer.finish(),
        "peak_staging_bytes": session.report.peak_staging_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
