"""Artifacts with compressed layers, and processes that open them: shared by these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fastload_common.config import Settings
from fastload_common.load import unpacked
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.testing.scripted_registry import ScriptedRegistry
from tests.common.load.session_harness import Model
from tests.common.pull.images import archive, compressed, file, sha256

RAW = "application/vnd.cncf.model.weight.v1.raw"
LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"


def forget() -> None:
    """As if this process had not used anything."""
    for descriptor in unpacked._held.values():
        os.close(descriptor)
    unpacked._held.clear()


def push_image(
    registry: ScriptedRegistry, tag: str, *tars: bytes, hows: tuple[str, ...] = ("gzip", "zstd")
) -> None:
    """An image whose layers are compressed by turns."""
    layers = [
        registry.put(compressed(tar, how), f"{LAYER}+{how}")
        for tar, how in zip(tars, hows * len(tars), strict=False)
    ]
    content = {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [sha256(tar) for tar in tars]},
    }
    config = registry.put(json.dumps(content).encode(), CONFIG)
    registry.artifact(tag, layers, config=config)


def push_model(registry: ScriptedRegistry, files: dict[str, bytes], tag: str = "v") -> str:
    """Each file in a layer of its own, in the folder m; the URI."""
    push_image(registry, tag, *(archive(file(f"m/{name}", data)) for name, data in files.items()))
    return f"oci://{registry.host}/r:{tag}/m"


def load(uri: str, settings: Settings, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Load and compare; the report's facts."""
    filled = Model(tensors)
    with LoadSession([WeightSource(uri)], settings) as session:
        session.load(filled, filled.load_weights)
    assert filled.holds(tensors)
    return dict(session.report.pulled)


def entry(settings: Settings) -> Path:
    assert settings.cache_dir is not None
    [found] = (settings.cache_dir / "unpacked").glob("sha*")
    return found


def entry_root(settings: Settings) -> Path:
    assert settings.cache_dir is not None
    return settings.cache_dir / "unpacked"


OPEN = """
import json, sys
from fastload_common.config import load_settings
from fastload_common.load.model_root import open_model_root
from fastload_common.load.report import LoadReport
uri, settings = sys.argv[1:]
report = LoadReport("python", "1", uri, 0)
source = open_model_root(uri, load_settings(json.loads(settings), {}), report)
print(json.dumps({"state": report.pulled["state"], "root": source.root}), flush=True)
sys.stdin.read()
"""


def start(uri: str, settings: Settings) -> subprocess.Popen[str]:
    """A process that opens the root, says how, and stays until its standard input closes."""
    names = ("oci_plain_http", "cache_dir", "max_attempts", "progress")
    given: dict[str, Any] = {}
    for name in names:
        value = getattr(settings, name)
        given[name] = value[0] if isinstance(value, tuple) else str(value)
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, uri, json.dumps(given)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process: subprocess.Popen[str]) -> dict[str, str]:
    output, _ = process.communicate("")
    assert process.returncode == 0
    return dict(json.loads(output))
