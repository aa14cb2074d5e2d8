"""What an operation does to its arguments, read from its own schema."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import torch

__all__ = ["READS_NO_VALUES", "Effect", "effect_of", "written_arguments"]

aten = torch.ops.aten


class Effect(Enum):
    """The kinds that the recorder tells apart."""

    COMPOSITE = "composite"  # made of other operations; seen whole in inference mode only
    VIEW = "view"  # the result shows the first argument's memory
    WRITE = "write"  # an argument is written to
    PURE = "pure"  # a new value


@cache
def effect_of(func: Any) -> Effect:
    """The effect of an operation; cached, since the set of operations is small.

    Composite operations are told apart since many of them give a view *or* a copy (contiguous,
    reshape, to), and their schema says view.
    """
    if func._can_decompose():
        return Effect.COMPOSITE
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return Effect.WRITE
    returns = schema.returns
    if returns and all(r.alias_info is not None for r in returns):
        return Effect.VIEW
    return Effect.PURE


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the operation writes to."""
    return tuple(
        (k, a.name)
        for k, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )


# They look at sizes and dtypes only, so a pending copy into their argument may stay pending.
READS_NO_VALUES = frozenset(
    {
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.is_pinned.default,
        aten.is_same_size.default,
    }
)
