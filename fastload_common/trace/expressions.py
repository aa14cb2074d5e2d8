"""Operations on lazy tensors that make new values: kept as expressions, computed later."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fastload_common.plan.geometry import View, contiguous_strides, dense_strides_like, ordered
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.nodes import Call, ExprNode, Owner
from fastload_common.trace.views import FAST_VIEWS, meta_like

__all__ = ["fast_copy", "fast_pick", "make_expression"]

aten = torch.ops.aten

# A real tensor inside an expression could change before the expression is evaluated; a small
# one is copied, for a larger one the expression is computed at once.
_SNAPSHOT_BYTES = 64 * 1024


def fast_copy(recorder: Owner, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`clone`, `contiguous` and `to`: a copy whose views can be taken from its source.

    Returns None where it is another operation or an unusual form of these.
    """
    if func is aten.clone.default:
        dtype = device = None
        if set(kwargs) - {"memory_format"}:
            return None
    elif func is aten._to_copy.default:
        if set(kwargs) - {"dtype", "device", "memory_format", "layout", "non_blocking"}:
            return None
        if kwargs.get("layout") not in (None, torch.strided):
            return None
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
    else:
        return None
    source = args[0]
    sizes, strides, _ = source.view_in_node
    memory_format = kwargs.get("memory_format")
    if memory_format is torch.contiguous_format:
        out_strides = contiguous_strides(sizes)
    elif memory_format in (None, torch.preserve_format) and _plain_order(sizes, strides):
        out_strides = dense_strides_like(sizes, strides)
    else:
        return None
    if device is not None:
        device = torch.device(device)
        if device.type == "meta":
            return None
    return _wrap(
        recorder,
        Call(func, args, kwargs),
        0,
        dtype or source.dtype,
        sizes,
        out_strides,
        device or source.device,
        copy_of=source,
    )


def fast_pick(recorder: Owner, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``w[[4, 5, 6, 7]]`` and `index_select`: a copy of a slice, if the numbers follow each other.

    Loaders take a rank's experts so. Returns None for other operations and other numbers.
    """
    if func is aten.index.Tensor and not kwargs:
        source, indices = args
        given = [dim for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1:
            return None
        [dim] = given
        index = indices[dim]
    elif func is aten.index_select.default and not kwargs:
        source, dim, index = args
    else:
        return None
    if type(source) is not LazyTensor or type(index) is LazyTensor or index.ndim != 1:
        return None
    if index.dtype not in (torch.int64, torch.int32) or index.device.type != "cpu":
        return None
    numbers = index.tolist()
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if not numbers or numbers[0] < 0 or step < 1 or numbers[-1] >= source.shape[dim]:
        return None
    if numbers != list(range(numbers[0], numbers[-1] + 1, step)):
        return None
    kept = FAST_VIEWS[aten.slice.Tensor](source, dim, numbers[0], numbers[-1] + 1, step)
    if kept is None:
        return None
    foretold = func(*tree_map_only(torch.Tensor, _to_meta, args))
    return _wrap(
        recorder,
        Call(aten.clone.default, (kept,), {}),
        0,
        source.dtype,
        tuple(foretold.shape),
        _foretold_strides(foretold),
        source.device,
        copy_of=kept,
    )


def _plain_order(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether torch's preserve_format result is foretold by sorting the strides."""
    if 0 in sizes or any(stride == 0 for n, stride in zip(sizes, strides, strict=True) if n != 1):
        return False
    box = ordered(sizes, strides, strides)
    dense = 1
    for size, stride in zip(reversed(box.sizes), reversed(box.src_strides), strict=True):
        if stride != dense:
            return False
        dense *= size
    return all(n != 1 for n in sizes) or strides == contiguous_strides(sizes)


def make_expression(recorder: Owner, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Any operation without side effects, as an expression.

    Returns:
        Lazy tensors in the shape of the operation's result, or None where it must be computed
        now: it gives no tensor, needs values, or takes large real tensors.
    """
    if "device" in kwargs or not _snapshots(args, kwargs):
        return None
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda value: value if type(value) is LazyTensor else value.clone(),
        (args, kwargs),
    )
    lazies = [value for value in tree_leaves((args, kwargs)) if type(value) is LazyTensor]
    device = lazies[0].device
    if any(lazy.device != device for lazy in lazies):
        return None
    try:
        meta_args, meta_kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        foretold = func(*meta_args, **meta_kwargs)
    except Exception:  # noqa: BLE001 - whatever meta kernels cannot do is computed instead
        return None
    outputs = list(foretold) if isinstance(foretold, list | tuple) else [foretold]
    if not outputs or not all(isinstance(value, torch.Tensor) for value in outputs):
        return None
    if any(value.is_conj() or value.is_neg() for value in outputs):
        return None  # memory that means other values than it holds; no strides tell that
    call = Call(func, args, kwargs)
    made = [
        _wrap(
            recorder,
            call,
            index,
            value.dtype,
            tuple(value.shape),
            _foretold_strides(value),
            device,
        )
        for index, value in enumerate(outputs)
    ]
    return type(foretold)(made) if isinstance(foretold, list | tuple) else made[0]


def _foretold_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides of the value that will be computed; it is laid out so if it comes otherwise."""
    view = View(tuple(value.shape), tuple(value.stride()), 0)
    if view.span == view.numel:
        return view.strides
    return dense_strides_like(view.sizes, view.strides)


def _snapshots(args: Any, kwargs: dict[str, Any]) -> bool:
    return all(
        type(value) is LazyTensor or value.nbytes <= _SNAPSHOT_BYTES
        for value in tree_leaves((args, kwargs))
        if isinstance(value, torch.Tensor)
    )


def _to_meta(value: torch.Tensor) -> torch.Tensor:
    if type(value) is LazyTensor:
        return meta_like(value)
    # A zero-dimensional tensor on the CPU takes part in type promotion as such.
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _wrap(
    recorder: Owner,
    call: Call,
    index: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    device: torch.device,
    copy_of: LazyTensor | None = None,
) -> LazyTensor:
    node = ExprNode(recorder, call, index, dtype, sizes, strides, device, copy_of)
    recorder.track(node)
    return LazyTensor(node, sizes, strides)
