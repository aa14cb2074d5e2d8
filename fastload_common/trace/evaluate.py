"""From lazy tensors to values: what they are made of, and how to compute them.

A value is always computed from the checkpoint, whose bytes never change, and never from
`Node.real`, which the engine may have written to since the value was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastload_common.trace.lazy_tensor import LazyTensor, restrided
from fastload_common.trace.nodes import Call, ExprNode, Node

__all__ = ["calls_of", "inputs_of", "leaves", "value_of"]


def inputs_of(call: Call) -> list[LazyTensor]:
    """The lazy tensors among a call's arguments."""
    return [value for value in tree_leaves((call.args, call.kwargs)) if type(value) is LazyTensor]


def _walk(lazy: LazyTensor) -> Iterator[LazyTensor]:
    """A lazy tensor and all that it is computed from, each once."""
    seen: set[int] = set()
    stack = [lazy]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        node = current.node
        if isinstance(node, ExprNode):
            stack.extend(inputs_of(node.call))


def leaves(lazy: LazyTensor) -> dict[int, LazyTensor]:
    """The lazy tensors over files that a value is made of, by id."""
    return {id(part): part for part in _walk(lazy) if not isinstance(part.node, ExprNode)}


def calls_of(lazy: LazyTensor) -> list[Call]:
    """The calls that must run for a value, each once."""
    found: dict[int, Call] = {}
    for part in _walk(lazy):
        node = part.node
        if isinstance(node, ExprNode):
            found[id(node.call)] = node.call
    return list(found.values())


def value_of(lazy: LazyTensor, leaf_value: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
    """Compute a lazy tensor from its leaves.

    Args:
        leaf_value: gives the real tensor for a lazy tensor over a file: same sizes and dtype.

    Returns:
        A real tensor with the sizes, dtype and order of strides of `lazy`.
    """
    node = lazy.node
    if not isinstance(node, ExprNode):
        return leaf_value(lazy)
    call = node.call
    if call.outputs is None:
        flat, spec = tree_flatten((call.args, call.kwargs))
        flat = [
            value_of(value, leaf_value) if type(value) is LazyTensor else value for value in flat
        ]
        args, kwargs = tree_unflatten(flat, spec)
        with _default_dtype(call.default_dtype):
            result = call.func(*args, **kwargs)
        call.outputs = list(result) if isinstance(result, list | tuple) else [result]
    return restrided(_laid_out(call.outputs[node.index], node), lazy)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype == before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _laid_out(value: torch.Tensor, node: Node) -> torch.Tensor:
    """The value with the strides that were foretold; views were computed from those."""
    dense = value.storage_offset() == 0 and tuple(value.stride()) == node.strides
    if dense:
        return value
    laid_out = torch.empty_strided(node.sizes, node.strides, dtype=value.dtype, device=value.device)
    return laid_out.copy_(value)
