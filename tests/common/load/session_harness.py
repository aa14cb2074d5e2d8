"""A model of plain parameters, loaded as the engines load theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from fastload_common.config import Settings
from fastload_common.load.session import LoadSession, WeightSource

Weights = Iterable[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """Parameters for the tensors of a checkpoint, and a loader like the engines'."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.rows = torch.nn.ParameterDict(
            {
                name.replace(".", "_"): torch.nn.Parameter(
                    torch.full_like(value, 7), requires_grad=False
                )
                for name, value in tensors.items()
            }
        )

    def parameter(self, name: str) -> torch.nn.Parameter:
        param: torch.nn.Parameter = self.rows[name.replace(".", "_")]
        return param

    def load_weights(self, weights: Weights) -> set[str]:
        loaded = set()
        for name, weight in weights:
            param = self.parameter(name)
            assert param.shape == weight.shape, f"{name}: {param.shape} != {weight.shape}"
            param.data.copy_(weight)
            loaded.add(name)
        return loaded

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(self.parameter(name), value) for name, value in tensors.items())

    def untouched(self, tensors: dict[str, torch.Tensor]) -> bool:
        return all(bool((self.parameter(name) == 7).all()) for name in tensors)


def load(
    directory: Path,
    settings: Settings,
    model: Model,
    consume: Callable[[Weights], object] | None = None,
    **options: str | None,
) -> LoadSession:
    with LoadSession([WeightSource(str(directory))], settings) as session:
        session.load(model, consume or model.load_weights, **options)
    return session
