"""The step by which models derive weights from others, done when those are there.

Models with latent attention end ``load_weights`` by computing from their parameters, layer by
layer. While they are traced those would have to be read one after the other, by each rank alone. As
the step is the last one, it can as well be done after all weights have been placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["DO_MORE_AFTER", "STEP", "postponed"]

STEP = "post_load_weights"

DO_MORE_AFTER = ("sglang.srt.models.deepseek_v4",)
"""Modules of models for which it is not the last step: done where the engine does it."""


@contextmanager
def postponed(model: nn.Module) -> Iterator[list[Callable[[], Any]]]:
    """Collect calls of the step instead of making them.

    Yields:
        The calls, in order, to be made when all weights are there. To be emptied where
        ``load_weights`` is run once more.
    """
    calls: list[Callable[[], Any]] = []
    modules = [module for module in model.modules() if _ends_with_it(module)]
    for module in modules:
        vars(module)[STEP] = _collector(getattr(module, STEP), calls)
    try:
        yield calls
    finally:
        for module in modules:
            del vars(module)[STEP]


def _ends_with_it(module: nn.Module) -> bool:
    kinds = type(module).__mro__
    return callable(getattr(module, STEP, None)) and not any(
        kind.__module__ in DO_MORE_AFTER for kind in kinds
    )


def _collector(step: Callable[..., Any], calls: list[Callable[[], Any]]) -> Callable[..., None]:
    def collect(*args: Any, **kwargs: Any) -> None:
        calls.append(lambda: step(*args, **kwargs))

    return collect
