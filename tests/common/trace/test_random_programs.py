"""Random programs over loaded tensors and parameters give the same with real and lazy ones.

A program is a list of steps, each a function of all values so far. It is run over real tensors
and over lazy ones; every parameter must end with the same bits, and every value that the
program looks at must be the same.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tests.bits import bytes_of
from tests.common.trace.harness import MemoryCheckpoint

PROGRAMS = 1500
STEPS = 9
SHAPES = [(4, 6), (6, 4), (4, 6), (8,), (2, 3, 4), (), (0, 4), (1, 6)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool]


@dataclass
class World:
    """Values by number, and what the program has looked at."""

    values: list[torch.Tensor]
    seen: list[object] = field(default_factory=list)


Step = Callable[[World], None]


class Programmer:
    """Draws programs; always the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def tensor(self) -> torch.Tensor:
        shape = self.random.choice(SHAPES)
        count = max(1, torch.Size(shape).numel())
        values = [self.random.randrange(8) for _ in range(count)]
        data = torch.tensor(values[: torch.Size(shape).numel()], dtype=torch.float32)
        return data.reshape(shape).to(self.random.choice(DTYPES))

    def parameter(self) -> torch.Tensor:
        tensor = self.tensor()
        kind = self.random.randrange(3)
        if kind == 1 and tensor.dim() == 2:
            return tensor.t().contiguous().t()
        if kind == 2 and tensor.dim() >= 1:  # a part of something larger
            whole = torch.cat([tensor, tensor, tensor], -1)
            return whole.narrow(-1, tensor.shape[-1], tensor.shape[-1])
        return tensor

    def step(self, count: int) -> Step:
        """A step over `count` values; it adds one value, or none."""
        a, b, c = (self.random.randrange(count) for _ in range(3))
        d, k, m = (self.random.randrange(8) for _ in range(3))
        made: dict[str, Callable[[World], object]] = {
            "view": lambda w: _view(w.values[a], d, k, m),
            "view again": lambda w: _view(_view(w.values[a], k, m, d), m, d, k),
            "new": lambda w: _new(w.values[a], w.values[b], d),
            "elementwise": lambda w: _elementwise(w.values[a], w.values[b], d),
            "copy": lambda w: _fit(w.values[a], d).copy_(_like(w.values[b], w.values[a], d)),
            "copy whole": lambda w: w.values[a].copy_(_like(w.values[b], w.values[a], 0)),
            "in place": lambda w: _in_place(w.values[a], w.values[b], d),
            "look": lambda w: w.seen.append(_look(w.values[c], d)),
        }
        names = list(made)
        name = self.random.choices(names, weights=[4, 2, 4, 3, 6, 3, 2, 1])[0]
        operation = made[name]

        def run(world: World) -> None:
            result = operation(world)
            if isinstance(result, torch.Tensor):
                world.values.append(result)
            elif name != "look":
                world.values.append(world.values[a])

        return run


def _fit(value: torch.Tensor, d: int) -> torch.Tensor:
    """The value or a part of it."""
    if d % 2 or value.dim() == 0:
        return value
    size = value.shape[d % value.dim()]
    return value.narrow(d % value.dim(), size // 3, size - size // 3)


def _like(value: torch.Tensor, target: torch.Tensor, d: int) -> torch.Tensor:
    """Something of the shape of `_fit(target, d)`, made of a value by reshaping its elements."""
    shape = _fit(target, d).shape
    if value.shape == shape:
        return value
    flat = value.reshape(-1)
    if flat.numel() < shape.numel():
        flat = flat[:1].expand(shape.numel()) if flat.numel() else torch.zeros(shape.numel())
    return flat[: shape.numel()].reshape(shape)


def _view(value: torch.Tensor, d: int, k: int, m: int) -> torch.Tensor:
    dims = value.dim()
    if dims == 0:
        return value.reshape(1) if d % 2 else value[None]
    dim = d % dims
    size = value.shape[dim]
    views: list[Callable[[], torch.Tensor]] = [
        lambda: value.narrow(dim, size // 2, size - size // 2),
        lambda: value.transpose(0, dim),
        lambda: value[..., m % 3 :: 2],
        lambda: value.reshape(-1),
        lambda: value.unsqueeze(dim),
        lambda: value.select(dim, m % size) if size else value,
        lambda: value.chunk(2, dim)[-1],
        lambda: value.expand(2, *value.shape),
    ]
    return views[k]()


def _new(a: torch.Tensor, b: torch.Tensor, d: int) -> torch.Tensor:
    news: list[Callable[[], torch.Tensor]] = [
        a.clone,
        a.contiguous,
        lambda: a.to(b.dtype),
        lambda: torch.cat([a.reshape(-1), b.reshape(-1)]),
        lambda: torch.stack([a, a]),
        lambda: a.float().sum(-1) if a.dim() else a.float(),
        lambda: torch.zeros_like(a),
        lambda: a.to(torch.bfloat16).to(torch.float32),
    ]
    return news[d]()


def _elementwise(a: torch.Tensor, b: torch.Tensor, d: int) -> torch.Tensor:
    if a.shape != b.shape or a.dtype != b.dtype or a.dtype is torch.bool:
        return a.float() * 2
    operations: list[Callable[[], torch.Tensor]] = [
        lambda: a + b,
        lambda: a * b,
        lambda: torch.where(a > 2, a, b),
        lambda: torch.maximum(a, b),
        lambda: a - 1 if a.dtype is not torch.uint8 else a + 1,
        lambda: a.float().exp(),
        lambda: a == b,
        lambda: a.masked_fill(b > 3, 5),
    ]
    return operations[d]()


def _in_place(a: torch.Tensor, b: torch.Tensor, d: int) -> object:
    if any(n > 1 and s == 0 for n, s in zip(a.shape, a.stride(), strict=True)):
        return None  # torch refuses to write through an expanded tensor
    if d % 3 == 0 or a.dtype is torch.bool:
        return a.zero_()
    if d % 3 == 1 and a.shape == b.shape and a.dtype == b.dtype and a is not b:
        return a.add_(b.clone())
    return a.mul_(2)


def _look(value: torch.Tensor, d: int) -> object:
    if d % 3 == 0:
        return value.sum().item()
    if d % 3 == 1:
        return value.tolist()
    return bool((value > 3).any())


def _run(seed: int, world: World) -> None:
    programmer = Programmer(seed)
    programmer.random.random()
    for _ in range(STEPS):
        programmer.step(len(world.values))(world)


@pytest.mark.parametrize("group", range(6))
def test_lazy_and_real_tensors_agree(group: int) -> None:
    differing, ran = [], 0
    for seed in range(group * PROGRAMS // 6, (group + 1) * PROGRAMS // 6):
        maker = Programmer(-seed - 1)
        tensors = {f"w{k}": maker.tensor() for k in range(3)}
        params = [maker.parameter() for _ in range(2)]
        expected = [copy_of(param) for param in params]
        real = World([*(tensor.clone() for tensor in tensors.values()), *expected])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _run(seed, real)
            except (RuntimeError, IndexError, TypeError):
                continue  # not a program that torch accepts
        ran += 1
        actual = [copy_of(param) for param in params]
        lazy = World([])
        checkpoint = MemoryCheckpoint(
            tensors,
            lead_bytes=maker.random.choice([64, 72, 77]),
            chunk_bytes=maker.random.choice([64, 128, 4096]),
            shuffle=maker.random.shuffle,
        )

        def body(loaded: dict[str, torch.Tensor], lazy: World = lazy, seed: int = seed) -> None:
            lazy.values += [*loaded.values(), *actual]  # noqa: B023 - run before the next round
            _run(seed, lazy)

        checkpoint.run(body)
        if [*map(bytes_of, expected)] != [*map(bytes_of, actual)] or real.seen != lazy.seen:
            differing.append(seed)
    assert not differing
    assert ran > PROGRAMS // 6 // 2


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides and the surroundings of the original."""
    whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size())
    whole = whole.to(tensor.dtype)
    whole.copy_(tensor.as_strided(whole.shape, (1,), 0))
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
