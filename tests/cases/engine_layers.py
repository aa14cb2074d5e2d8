"""Single layers of the real engine, filled by its own weight loaders. In the worker.

Each is filled twice: with the tensors themselves, as the default loader does, and by a
`LoadSession` that reads their file. What must be equal is every byte of the layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastload_common.config import load_settings
from fastload_common.load.session import LoadSession, WeightSource
from tests.cases.engine_models import FIRST_NUMBER, numbered_bytes
from tests.vllm.equivalence_worker import state_of

__all__ = ["FIRST_NUMBER", "Layers", "Weights", "compare_layers", "numbered"]

Weights = Iterable[tuple[str, torch.Tensor]]
Files = Mapping[str, Mapping[str, torch.Tensor]]


def numbered(*sizes: int, first: int = 0) -> torch.Tensor:
    """F32 elements that no other tensor has, if each gets a range of its own."""
    count = int(torch.Size(sizes).numel())
    start = FIRST_NUMBER + first
    return torch.arange(start, start + count, dtype=torch.float32).reshape(sizes)


class Layers(torch.nn.Module):
    """Layers by name; takes tensors named ``layer.parameter`` or ``layer.parameter.shard``.

    A shard that is a number is passed as one.
    """

    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            layer, parameter, *shard = name.split(".")
            param = self.get_submodule(layer).get_parameter(parameter)
            given = [int(part) if part.isdigit() else part for part in shard]
            load_weight: Any = param.weight_loader  # type: ignore[attr-defined]
            load_weight(param, tensor, *given)


def compare_layers(build: Callable[[], Any], files: Files, **settings: Any) -> dict[str, Any]:
    """Fill what `build` makes from tensors and from files, and compare all of it.

    Returns:
        ``different``: names; ``held_bytes``: of a numbered checkpoint, each element once;
        ``needed_bytes``, ``fetched_bytes`` and more of the report. Where the engine refuses the
        tensors: ``refused``, its words, and ``said``, those of fastload.
    """
    expected = build()
    refused = None
    try:
        expected.load_weights(
            (name, tensor.clone()) for file in files.values() for name, tensor in file.items()
        )
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    actual = build()
    with tempfile.TemporaryDirectory() as directory:
        for file, tensors in files.items():
            save_file(dict(tensors), Path(directory) / f"{file}.safetensors")
        try:
            report = _load(directory, actual, settings)
        except Exception as error:
            return {"refused": refused, "said": f"{type(error).__name__}: {error}"}
    wanted, found = state_of(expected), state_of(actual)
    return {
        "refused": refused,
        "said": None,
        "different": sorted(n for n in wanted | found if wanted.get(n) != found.get(n)),
        "held_bytes": numbered_bytes(expected),
        **report,
    }


def _load(directory: str, model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {"progress": "off", "merge_gap_bytes": 0, "memory_bytes": "8MiB"}
    with LoadSession(
        [WeightSource(directory)], load_settings(plain | dict(settings), {})
    ) as session:
        session.load(model, model.load_weights)
    found = session.report.as_dict()
    names = ("needed_bytes", "fetched_bytes", "model_bytes", "settled_reads", "eager_reason")
    return {name: found[name] for name in (*names, "over_read_bytes", "requests")}
