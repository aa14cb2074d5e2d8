"""Calls the loader inside the real vLLM with small modules of our own. Not a test itself.

    python loader_worker.py JSON        {"root": "directory with the checkpoints"}

prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

Weights = Iterable[tuple[str, torch.Tensor]]


class Module(torch.nn.Module):
    """Two parameters; takes what it knows, tells what it loaded, as vLLM's models do."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.values = torch.nn.ParameterDict(
            {name: torch.zeros(4, 4, dtype=torch.bfloat16) for name in names or ("a", "b")}
        )
        self.seen: list[str] = []

    def load_weights(self, weights: Weights) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.seen.append(name)
            if name in self.values:
                self.values[name].data.copy_(tensor)
                loaded.add(f"values.{name}")
        return loaded

    def sums(self) -> dict[str, float]:
        return {name: float(value.float().sum()) for name, value in self.values.items()}


def make_loader(**arguments: Any) -> Any:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(LoadConfig(load_format="fastload", **arguments))


def model_config(model: Path | str, **more: Any) -> Any:
    facts = {
        "model": str(model),
        "model_weights": "",
        "revision": None,
        "quantization": None,
        "config_format": "auto",
    }
    return SimpleNamespace(**facts | more)


def attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "frames": _frames(error),
            "cause": error.__cause__ is not None or not error.__suppress_context__,
        }


def _frames(error: BaseException) -> list[str]:
    names, trace = [], error.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


def load(model: Module, config: Any, **arguments: Any) -> Any:
    def action() -> Any:
        make_loader(**arguments).load_weights(model, config)
        return {"sums": model.sums(), "seen": model.seen}

    return attempt(action)


def online_quantized() -> Module:
    module = Module()
    module.quant_method = SimpleNamespace(uses_meta_device=True)  # type: ignore[assignment]
    return module


def with_secondary(root: Path, model: str) -> Module:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    module = Module("a", "b", "more_c")
    module.secondary_weights = [  # type: ignore[assignment]
        DefaultModelLoader.Source(model, None, subfolder="inner", prefix="more_"),
    ]
    return module


def with_patterns() -> Module:
    module = Module("a")
    module.allow_patterns_overrides = ["other*.safetensors"]  # type: ignore[assignment]
    return module


def roots(root: Path) -> dict[str, str]:
    """Where weights are looked for: own URI, the target's, a directory."""
    from fastload_vllm import port

    target = model_config("/metadata/of/target", model_weights="s3://b/target")
    config = SimpleNamespace(model_config=None, speculative_config=None)
    current = SimpleNamespace(get=lambda: lambda: config)
    vars(port)["compat"] = SimpleNamespace(CURRENT_CONFIG=current)
    found = {
        "own": port.weights_root(model_config("/x", model_weights="s3://b/own")),
        "directory": port.weights_root(model_config("/metadata/of/target")),
    }
    config.model_config = target
    found["in-target"] = port.weights_root(model_config("/metadata/of/target"))
    config.model_config = model_config("/draft")
    config.speculative_config = SimpleNamespace(target_model_config=target)
    found["in-target-of-draft"] = port.weights_root(model_config("/metadata/of/target"))
    found["beside-target"] = port.weights_root(model_config("/elsewhere"))
    return found


def main(root: Path) -> dict[str, Any]:
    import vllm.model_executor.model_loader as loaders

    import fastload_vllm
    from fastload_common.load.session import RankPlace

    logging.basicConfig(level=logging.INFO)
    fastload_vllm.register()
    loader_module = sys.modules["fastload_vllm.loader"]
    loader_module.rank_place = lambda: RankPlace(engine="vllm")  # type: ignore[attr-defined]
    assert loaders is not None
    one, both = root / "one", root / "both"
    reload = make_loader().get_all_weights(model_config(one), Module())
    return {
        "plain": load(Module(), model_config(one)),
        "uri-first": load(Module(), model_config(root, model_weights=str(one))),
        "missing": load(Module("a", "b", "c"), model_config(one)),
        "missing-quantized": load(Module("a", "b", "c"), model_config(one, quantization="fp8")),
        "no-directory": load(Module(), model_config("/no/such/directory")),
        "unknown-setting": attempt(lambda: make_loader(model_loader_extra_config={"a": 1})),
        "torchao": load(Module(), model_config(one, quantization="torchao")),
        "online": load(online_quantized(), model_config(one)),
        "secondary": load(with_secondary(root, str(one)), model_config(one)),
        "patterns": load(with_patterns(), model_config(root / "more")),
        "mistral-set": load(Module(), model_config(both)),
        "hf-set": load(Module(), model_config(both, config_format="hf")),
        "ignored": load(Module(), model_config(one), ignore_patterns=["model*"]),
        "reload": {name: float(tensor.float().sum()) for name, tensor in reload},
        "roots": roots(root),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(json.loads(sys.argv[1])["root"]))), flush=True)
    os._exit(0)
