"""Makes a checkpoint from the engine's own model: for architectures that transformers cannot save.

The engine's parameters are taken apart as the model itself says they are put together (stacked
projections, experts, renamed prefixes), under the names that its `load_weights` wants. Which
of a few ways is right, the model decides: the one that it loads, and that leaves no parameter
unwritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

STACKED: dict[str, list[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}

EXPERT_NAMES = (
    ("gate_proj", "down_proj", "up_proj"),
    ("w1", "w2", "w3"),
    ("linear", "linear_1", "linear_v"),
)


class NoNamesError(RuntimeError):
    """No way of naming the parameters was right."""


def name_tensors(
    build: Callable[[], Any],
    renames: Sequence[Mapping[str, str]] = ({},),
    *,
    shared: Sequence[str] = (),
    seed: int = 0,
) -> Tensors:
    """Find names and shapes that the model loads, and give them random values.

    Args:
        build: makes the model, its parameters not initialized.
        renames: parts of names -> what they are in the checkpoint; one of these is right.
        shared: parts of the names of parameters that another model may fill.

    Raises:
        NoNamesError: with what the model said to the way that came furthest.
    """
    model = build()
    stacked = _stacked(model)
    present = sorted({leaf for leaf in _leaves(model) if leaf in stacked})
    best: tuple[int, str] = (1 << 30, "it has no parameters")
    switches = list(itertools.product((True, False), repeat=min(len(present), 3)))
    for split, renamed, experts, rename in itertools.product(
        switches, (True, False), EXPERT_NAMES, renames
    ):
        chosen = {leaf: stacked[leaf] for leaf, on in zip(present, split, strict=False) if on}
        taken = _Taker(model, chosen, experts, renamed, seed).all()
        tensors = {_replaced(name, rename): value for name, value in taken.items()}
        trial = build()
        try:
            trial.load_weights(iter(list(tensors.items())))
        except Exception as error:
            if best[0] == 1 << 30:
                best = (1 << 30, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
            continue
        unwritten = [
            name
            for name, value in trial.named_parameters()
            if _is_unwritten(value) and not any(part in name for part in shared)
        ]
        if not unwritten:
            return tensors
        if len(unwritten) < best[0]:
            best = (len(unwritten), f"{len(unwritten)} not loaded, such as {unwritten[0]}")
    raise NoNamesError(best[1])


def _replaced(name: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        name = name.replace(old, new, 1)
    return name


def _is_unwritten(value: torch.Tensor) -> bool:
    if not value.numel():
        return False
    if value.is_floating_point():
        return bool(torch.isnan(value.detach().float()).all())
    return bool((value == torch.iinfo(value.dtype).max).all())


def _stacked(model: Any) -> dict[str, list[str]]:
    """Name of a stacked module -> names of its parts, in order, as the model's classes say."""
    found = dict(STACKED)
    for module in model.modules():
        for name, parts in (getattr(module, "packed_modules_mapping", None) or {}).items():
            if len(parts) > 1:
                found[name] = list(parts)
    return found


def _leaves(model: Any) -> Iterator[str]:
    for path, module in model.named_modules():
        if len(getattr(module, "output_sizes", ())) > 1:
            yield path.rpartition(".")[2]


class _Taker:
    """Takes a model's parameters apart in one way."""

    def __init__(
        self,
        model: Any,
        stacked: Mapping[str, list[str]],
        experts: tuple[str, str, str],
        renamed: bool,
        seed: int,
    ) -> None:
        self._model = model
        self._stacked = stacked
        self._experts = experts
        self._mapper = getattr(model, "hf_to_vllm_mapper", None) if renamed else None
        self._random = torch.Generator().manual_seed(seed)
        mapping = getattr(model, "get_expert_mapping", None)
        self._expert_mapping = list(mapping()) if mapping is not None else []

    def all(self) -> Tensors:
        modules = dict(self._model.named_modules())
        tensors: Tensors = {}
        for name, parameter in self._model.named_parameters():
            path, _, last = name.rpartition(".")
            parts = self._parts(path, last, modules[path], parameter)
            tensors |= {self._original(part): value for part, value in parts}
        return tensors

    def _parts(
        self, path: str, last: str, module: Any, parameter: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        parent, _, leaf = path.rpartition(".")
        if last.startswith(("w13_", "w2_")):
            yield from self._of_experts(path, last, parameter)
        elif leaf in self._stacked and len(self._stacked[leaf]) == len(module.output_sizes):
            dim = getattr(parameter, "output_dim", 0)
            total = sum(module.output_sizes)
            for part, size in zip(self._stacked[leaf], module.output_sizes, strict=True):
                shape = list(parameter.shape)
                shape[dim] = shape[dim] * size // total
                yield f"{parent}.{part}.{last}", self._value(shape, parameter.dtype)
        else:
            shape = self._unpadded(module, parameter)
            yield name_of(path, last), self._value(shape, parameter.dtype)

    def _unpadded(self, module: Any, parameter: torch.Tensor) -> list[int]:
        shape = list(parameter.shape)
        original = getattr(module, "org_vocab_size", None)
        if original is not None and shape and shape[0] > original:
            shape[0] = original
        return shape

    def _of_experts(
        self, path: str, last: str, parameter: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        gate, down, up = self._experts
        kind, _, rest = last.partition("_")
        where = path.removesuffix(".routed_experts")
        for expert in range(parameter.shape[0]):
            shape = list(parameter.shape[1:])
            names = [down]
            if kind == "w13":
                names = [gate, up]
                shape[0] //= 2
            for name in names:
                yield f"{where}.{expert}.{name}.{rest}", self._value(shape, parameter.dtype)

    def _value(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            value = torch.randn(shape, generator=self._random) * 0.1 + 0.01
            return value.to(dtype)
        return torch.randint(0, 100, shape, generator=self._random).to(dtype)

    def _original(self, name: str) -> str:
        """The checkpoint's name, which the model's own mapping turns into this one."""
        if self._mapper is None:
            return name
        seen, border = {name}, [name]
        for _ in range(4):
            border = [new for old in border for new in _undone(self._mapper, old)]
            border = [new for new in dict.fromkeys(border) if new not in seen]
            seen.update(border)
            for candidate in border:
                if _mapped(self._mapper, candidate) == name:
                    return candidate
        return name


def name_of(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last


def _mapped(mapper: Any, name: str) -> str | None:
    result: str | None = mapper.map_name(name)
    return result


def _undone(mapper: Any, name: str) -> Iterator[str]:
    """What one rule of the mapping may have made this name of."""
    for old, new in mapper.orig_to_new_prefix.items():
        if new is not None and name.startswith(new):
            yield old + name[len(new) :]
    for old, new in mapper.orig_to_new_substr.items():
        if new and new in name:
            yield name.replace(new, old, 1)
    for old, new in mapper.orig_to_new_suffix.items():
        if new is not None and name.endswith(new):
            yield name[: len(name) - len(new)] + old
