"""Reloading in place in the real engine: what is read again, and what is generated afterwards.

SGLang's ``update_weights_from_disk`` is a case of its adapter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.testing.rig import Rig
from tests.cases.engine_checkpoints import body_bytes, put
from tests.cases.engine_process import ROOT

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = ROOT / "tests" / "cases" / "reload_worker.py"


@pytest.fixture(scope="module")
def store() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), "qwen3", seed=seed) for seed in range(2)]


def run(
    store: Rig, directory: Path, engine: dict[str, Any], steps: list[dict[str, Any]]
) -> list[Any]:
    """Start an engine, generate, and generate again after each step: tokens, or an error."""
    job = {"engine": engine, "steps": steps}
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(job)],
        env=os.environ
        | store.environ()
        | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "FASTLOAD_CACHE_DIR": str(directory),
            "PYTHONPATH": str(ROOT),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-5000:]
    found: list[Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def test_t20_reloads_read_again_and_from_where_they_are_told(
    store: Rig, models: list[Path], tmp_path: Path
) -> None:
    """Twice in place, then another model by its URI, and in place again: that one's weights."""
    uris = [put(store, model, f"reload-{k}") for k, model in enumerate(models)]
    in_place: dict[str, Any] = {"reload": None}
    found = run(
        store,
        tmp_path,
        {"model": uris[0], "load_format": "fastload"},
        [in_place, in_place, {"reload": uris[1]}, in_place, {"sleep": 2}],
    )
    wanted = run(
        store,
        tmp_path,
        {"model": str(models[0])},
        [{"reload": str(models[1])}],
    )
    first, second = wanted
    assert first != second
    # On a CPU the engine does not sleep; what it does on waking up is read again all the same.
    assert found == [first, first, first, second, second, second]
    sizes = [sum(path.stat().st_size for path in model.glob("*.safetensors")) for model in models]
    # Three loads of each; what stands in headers is not counted.
    for k, times in ((0, 3), (1, 3)):
        asked = body_bytes(store, f"reload-{k}/")
        assert times * 0.9 * sizes[k] < asked <= times * sizes[k]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_t20_sleep_at_both_levels(
    store: Rig, models: list[Path], tmp_path: Path, quantization: str | None
) -> None:
    """Not run here: tokens are the same after each way of waking up, quantized or not."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    uri = put(store, models[0], "sleeping")
    engine = {"model": uri, "load_format": "fastload", "enable_sleep_mode": True}
    found = run(
        store,
        tmp_path,
        engine | {"quantization": quantization},
        [{"sleep": 1}, {"sleep": 2}, {"sleep": 2}],
    )
    assert found == [found[0]] * 4
