"""What weight loaders do with tensors, drawn by a seed: slices, casts, transposes, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch

Tensors = dict[str, torch.Tensor]
_Make = Callable[[Random, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
_Copy = Callable[[torch.Tensor, torch.Tensor], object]

_DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float16)


@dataclass
class Program:
    """Tensors of a checkpoint, parameters, and how the ones are copied into the others."""

    seed: int
    tensors: Tensors = field(default_factory=dict)
    params: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = Random(self.seed)
        self._steps: list[tuple[str, str]] = []
        for number in range(random.randint(3, 9)):
            name, way = f"w{number}", random.choice(list(_WAYS))
            tensor, param = _WAYS[way][0](random, random.choice(_DTYPES))
            self.tensors[name] = tensor
            self.params[name] = param
            self._steps.append((name, way))

    def run(self, loaded: Tensors, params: Tensors) -> None:
        for name, way in self._steps:
            _WAYS[way][1](params[name], loaded[name])

    def __repr__(self) -> str:
        return f"Program({self.seed}: {self._steps})"


def _random(random: Random, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return torch.randint(0, 100, sizes, generator=generator).to(dtype)


def _new(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.full(sizes, 7).to(dtype)


def _whole(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = random.randint(1, 60), random.randint(1, 60)
    return _random(random, dtype, rows, columns), _new(dtype, rows, columns)


def _halves(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = 2 * random.randint(1, 30), 2 * random.randint(1, 40)
    return _random(random, dtype, rows, columns), _new(dtype, rows, columns)


def _small(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    size = random.randint(0, 20)
    return _random(random, dtype, size), _new(dtype, size)


def _cast(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    tensor, param = _halves(random, dtype)
    return tensor, param.to(torch.float64)


def _turned(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    tensor, param = _halves(random, dtype)
    return tensor, param.t().contiguous()


def _experts(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = random.randint(1, 5), 2 * random.randint(1, 10), 2 * random.randint(1, 20)
    return _random(random, dtype, *sizes), _new(dtype, *sizes)


def _spread_out(random: Random, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    tensor, _ = _halves(random, dtype)
    return tensor, _new(dtype, 3, *tensor.shape)


def _left(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.narrow(-1, 0, tensor.shape[-1] // 2)


def _right(tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.shape[-1] // 2
    return tensor.narrow(-1, half, half)


_WAYS: dict[str, tuple[_Make, _Copy]] = {
    "whole": (_whole, lambda p, w: p.copy_(w)),
    "small": (_small, lambda p, w: p.copy_(w)),
    "also small": (_small, lambda p, w: p.copy_(w)),
    "rows": (_halves, lambda p, w: p[: len(p) // 2].copy_(w[len(w) // 2 :])),
    "columns": (_halves, lambda p, w: _left(p).copy_(_right(w))),
    "columns of its own": (
        _halves,
        lambda p, w: p.view(-1)[: w.numel() // 2].view(len(w), -1).copy_(_right(w)),
    ),
    "cast": (_cast, lambda p, w: p.copy_(w)),
    "columns cast": (_cast, lambda p, w: _right(p).copy_(_left(w))),
    "turned": (_turned, lambda p, w: p.copy_(w.t())),
    "every other row": (_halves, lambda p, w: p[: len(p) // 2].copy_(w[::2])),
    "every other column": (_halves, lambda p, w: _left(p).copy_(w[:, ::2])),
    "experts": (_experts, lambda p, w: _left(p).copy_(_right(w))),
    "experts turned": (
        _experts,
        lambda p, w: p.view(p.shape[0], p.shape[2], p.shape[1]).copy_(w.transpose(1, 2)),
    ),
    "into one of three": (_spread_out, lambda p, w: p[1].copy_(w)),
    "to all three": (_spread_out, lambda p, w: p.copy_(w.expand(3, *w.shape))),
    "computed": (_halves, lambda p, w: p.copy_(w + w)),
}
