"""View operations on lazy tensors: geometry in plain Python for the common ones, torch's own
meta kernels for all others. A handler returns None where it does not apply (torch then says why).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fastload_common.plan.geometry import view_strides
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.misfit import misfit
from fastload_common.trace.transfer import destination_view, storage_key

__all__ = ["FAST_VIEWS", "meta_like", "view_by_meta"]

aten = torch.ops.aten
Handler = Callable[..., Any]


def _slice(
    lazy: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    if not -len(sizes) <= dim < len(sizes) or step < 1:
        return None
    dim %= len(sizes)
    first, stop, _ = slice(start, end).indices(sizes[dim])
    stop = max(first, stop)
    length = -(-(stop - first) // step)
    return LazyTensor(
        lazy.node,
        (*sizes[:dim], length, *sizes[dim + 1 :]),
        (*strides[:dim], strides[dim] * step, *strides[dim + 1 :]),
        offset + first * strides[dim],
        lazy.dtype,
    )


def _select(lazy: LazyTensor, dim: int, index: int) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    if not -len(sizes) <= dim < len(sizes):
        return None
    dim %= len(sizes)
    if not -sizes[dim] <= index < sizes[dim]:
        return None
    index %= sizes[dim]
    return LazyTensor(
        lazy.node,
        sizes[:dim] + sizes[dim + 1 :],
        strides[:dim] + strides[dim + 1 :],
        offset + index * strides[dim],
        lazy.dtype,
    )


def _permute(lazy: LazyTensor, dims: list[int]) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    count = len(sizes)
    if any(not -count <= d < count for d in dims):
        return None
    order = [d % count for d in dims]
    if sorted(order) != list(range(count)):
        return None
    return LazyTensor(
        lazy.node,
        tuple(sizes[d] for d in order),
        tuple(strides[d] for d in order),
        offset,
        lazy.dtype,
    )


def _transpose(lazy: LazyTensor, dim0: int, dim1: int) -> LazyTensor | None:
    count = lazy.dim()
    if not (-count <= dim0 < count and -count <= dim1 < count):
        return None
    order = list(range(count))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(lazy, order)


def _t(lazy: LazyTensor) -> LazyTensor | None:
    if lazy.dim() > 2:
        return None
    return _permute(lazy, list(reversed(range(lazy.dim()))))


def _view(lazy: LazyTensor, size: list[int]) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    new = list(size)
    numel = lazy.numel()
    if -1 in new:
        rest = 1
        for n in new:
            rest *= n if n != -1 else 1
        if new.count(-1) > 1 or rest == 0 or numel % rest:
            return None
        new[new.index(-1)] = numel // rest
    count = 1
    for n in new:
        count *= n
    if count != numel or any(n < 0 for n in new):
        return None
    new_strides = view_strides(sizes, strides, tuple(new))
    if new_strides is None:
        return None
    return LazyTensor(lazy.node, tuple(new), new_strides, offset, lazy.dtype)


def _unsqueeze(lazy: LazyTensor, dim: int) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    if not -len(sizes) - 1 <= dim <= len(sizes):
        return None
    if dim < 0:
        dim += len(sizes) + 1
    stride = sizes[dim] * strides[dim] if dim < len(sizes) else 1
    return LazyTensor(
        lazy.node,
        (*sizes[:dim], 1, *sizes[dim:]),
        (*strides[:dim], stride, *strides[dim:]),
        offset,
        lazy.dtype,
    )


def _squeeze(lazy: LazyTensor, dims: int | list[int] | None = None) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    count = len(sizes)
    if dims is None:
        chosen = set(range(count))
    else:
        wanted = [dims] if isinstance(dims, int) else dims
        if any(not -count <= d < count for d in wanted):
            return None
        chosen = {d % count for d in wanted}
    kept = [d for d in range(count) if d not in chosen or sizes[d] != 1]
    return LazyTensor(
        lazy.node,
        tuple(sizes[d] for d in kept),
        tuple(strides[d] for d in kept),
        offset,
        lazy.dtype,
    )


def _expand(lazy: LazyTensor, size: list[int], *, implicit: bool = False) -> LazyTensor | None:
    sizes, strides, offset = lazy.view_in_node
    extra = len(size) - len(sizes)
    if extra < 0:
        return None
    new_sizes: list[int] = []
    new_strides: list[int] = []
    for d, n in enumerate(size):
        old, stride = (sizes[d - extra], strides[d - extra]) if d >= extra else (1, 0)
        if n == -1 and d >= extra:
            n = old
        if n < 0 or (n != old and old != 1):
            return None
        new_sizes.append(n)
        new_strides.append(stride if n == old and d >= extra else 0)
    return LazyTensor(lazy.node, tuple(new_sizes), tuple(new_strides), offset, lazy.dtype)


def _alias(lazy: LazyTensor) -> LazyTensor:
    return LazyTensor(lazy.node, *lazy.view_in_node, lazy.dtype)


def _pieces(lazy: LazyTensor, lengths: list[int], dim: int) -> list[LazyTensor] | None:
    parts = []
    start = 0
    for length in lengths:
        part = _slice(lazy, dim, start, start + length)
        if part is None or part.shape[dim] != length:
            return None
        parts.append(part)
        start += length
    return parts if start == lazy.shape[dim] else None


def _split(lazy: LazyTensor, size: int, dim: int = 0) -> list[LazyTensor] | None:
    if not -lazy.dim() <= dim < lazy.dim() or size <= 0:
        return None
    whole = lazy.shape[dim]
    lengths = [min(size, whole - start) for start in range(0, whole, size)] or [0]
    return _pieces(lazy, lengths, dim)


def _split_with_sizes(lazy: LazyTensor, sizes: list[int], dim: int = 0) -> list[LazyTensor] | None:
    if not -lazy.dim() <= dim < lazy.dim() or any(n < 0 for n in sizes):
        return None
    return _pieces(lazy, sizes, dim)


def _unbind(lazy: LazyTensor, dim: int = 0) -> list[Any] | None:
    if not -lazy.dim() <= dim < lazy.dim():
        return None
    return [_select(lazy, dim, index) for index in range(lazy.shape[dim])]


FAST_VIEWS: dict[Any, Handler] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
}


def meta_like(lazy: LazyTensor) -> torch.Tensor:
    """A meta tensor with the geometry of a lazy one, over as much (imagined) memory."""
    node = lazy.node
    size_bytes = node.dtype.itemsize * math.prod(node.sizes)
    base = torch.empty(size_bytes // lazy.dtype.itemsize, dtype=lazy.dtype, device="meta")
    return base.as_strided(*lazy.view_in_node)


def view_by_meta(func: Any, lazy: LazyTensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run any view operation on a meta tensor and take the geometry from its result.

    Returns:
        Lazy tensors in the form of the operation's result, or None where it turns out to copy.

    Raises:
        GeometryError: torch refuses these arguments for a tensor of this shape.
    """
    try:
        base = meta_like(lazy)
        result = func(base, *args[1:], **kwargs)
    except (RuntimeError, IndexError) as error:
        raise misfit(lazy.node, str(error)) from error

    size_bytes = lazy.node.dtype.itemsize * math.prod(lazy.node.sizes)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        view = destination_view(value)
        # Meta tensors have no memory whose end as_strided could respect.
        if (view.offset + view.span) * value.dtype.itemsize > size_bytes:
            raise misfit(lazy.node, f"{func} reaches beyond its end")
        return LazyTensor(lazy.node, *view, value.dtype)

    values = result if isinstance(result, list | tuple) else [result]
    memory = storage_key(base)
    for value in values:
        if isinstance(value, torch.Tensor) and (
            storage_key(value) != memory or value.is_conj() or value.is_neg()
        ):
            return None  # it copies, or means other values than the memory holds
    if isinstance(result, list | tuple):
        return type(result)(wrap(value) for value in result)
    return wrap(result)
