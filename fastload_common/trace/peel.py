"""Take a copy's source from as far down as possible, so that only its slice is read.

``param.copy_(w.t().contiguous().narrow(0, a, n))`` needs the columns a..a+n of w, not all of w.
"""

from __future__ import annotations

import torch

from fastload_common.plan.geometry import rebase
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.nodes import ExprNode

__all__ = ["peel"]


def peel(destination: torch.Tensor, source: LazyTensor) -> tuple[torch.Tensor, LazyTensor]:
    """Look through copies under `source`.

    Args:
        destination: real tensor with the sizes of `source`.

    Returns:
        The destination, its dimensions split where that was needed, and a lazy tensor of the
        same sizes that holds the same elements; a cast is left out only if copying into the
        destination does the same cast.
    """
    sizes = tuple(destination.shape)
    current = source
    cast = False
    while True:
        node = current.node
        if not isinstance(node, ExprNode) or node.copy_of is None:
            break
        base = node.copy_of
        if current.dtype != node.dtype:
            break
        casts = base.dtype != node.dtype
        if casts and (cast or node.dtype != destination.dtype):
            break
        view = rebase(current.view_in_node, node.sizes, node.strides, base.view_in_node)
        if view is None:
            break
        current = LazyTensor(base.node, *view, base.dtype)
        cast |= casts  # one cast is left to the copy; a second one must stay
    if current is source:
        return destination, source
    return _split_like(destination, sizes, tuple(current.shape)), current


def _split_like(
    destination: torch.Tensor, sizes: tuple[int, ...], split: tuple[int, ...]
) -> torch.Tensor:
    """View a tensor with each dimension split as in `split` (same elements, same order)."""
    if sizes == split:
        return destination
    strides: list[int] = []
    rest = list(split)
    for size, stride in zip(sizes, destination.stride(), strict=True):
        group = [rest.pop(0)]
        count = group[0]
        while count != size:
            group.append(rest.pop(0))
            count *= group[-1]
        inner = stride
        steps = []
        for n in reversed(group):
            steps.append(inner)
            inner *= n
        strides += reversed(steps)
    return destination.as_strided(split, strides, destination.storage_offset())
