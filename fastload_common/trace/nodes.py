"""What a lazy tensor stands for: a tensor in the checkpoint, or a computation over such.

A node is the "storage" of lazy tensors: all views of one loaded tensor share its node, so an
in-place write through one view is seen by the others, as with real tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.plan.geometry import View, contiguous_strides
from fastload_common.plan.records import TensorRead

if TYPE_CHECKING:
    from fastload_common.trace.lazy_tensor import LazyTensor
    from fastload_common.trace.recorder import Recorder
    from fastload_common.trace.transfer import Transfer

__all__ = ["Call", "ExprNode", "FileNode", "Node", "leaves", "real_view", "value_of"]


_HOST = torch.device("cpu")


class Node:
    """Common part.

    Attributes:
        sizes, strides: the dense layout of the whole value, in elements, offset 0.
        real: the value once it had to exist (read early, or written to), else None.
        users: recorded transfers that read this node directly.
        derived: computations over this node; they must be evaluated before it is written to.
    """

    __slots__ = (
        "__weakref__",
        "derived",
        "device",
        "dtype",
        "real",
        "recorder",
        "sizes",
        "strides",
        "users",
    )

    def __init__(
        self,
        recorder: Recorder,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.recorder = recorder
        self.dtype = dtype
        self.sizes = sizes
        self.strides = strides
        self.device = device
        self.real: torch.Tensor | None = None
        self.users: list[Transfer] | None = None  # a list of its own costs, and there are many
        self.derived: list[weakref.ref[ExprNode]] | None = None

    def add_user(self, transfer: Transfer) -> None:
        if self.users is None:
            self.users = [transfer]
        else:
            self.users.append(transfer)

    def remove_user(self, transfer: Transfer) -> None:
        if self.users is not None and transfer in self.users:
            self.users.remove(transfer)

    def add_derived(self, node: ExprNode) -> None:
        if self.derived is None:
            self.derived = []
        self.derived.append(weakref.ref(node))


class FileNode(Node):
    """One tensor of the checkpoint, row-major at its place in its object."""

    __slots__ = ("entry",)

    def __init__(
        self,
        recorder: Recorder,
        entry: TensorEntry,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
    ) -> None:
        super().__init__(recorder, dtype, sizes, contiguous_strides(sizes), _HOST)
        self.entry = entry

    def read(self, view: View, itemsize_bytes: int) -> TensorRead:
        """The bytes behind a view of this tensor."""
        entry = self.entry
        return TensorRead(entry.object_id, entry.byte_range.start, itemsize_bytes, view)


class Call:
    """One operation of the engine that is not a view, kept to be run when its inputs are there."""

    __slots__ = ("args", "func", "kwargs", "outputs")

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.outputs: list[Any] | None = None  # while a resolver evaluates it

    def inputs(self) -> list[LazyTensor]:
        from fastload_common.trace.lazy_tensor import LazyTensor

        flat, _ = tree_flatten((self.args, self.kwargs))
        return [value for value in flat if isinstance(value, LazyTensor)]


class ExprNode(Node):
    """One output of a `Call`.

    Attributes:
        copy_of: set if the value equals this tensor element by element, cast to `dtype`
            (clone, contiguous, to): views of it can then be taken from there.
    """

    __slots__ = ("call", "copy_of", "index")

    def __init__(
        self,
        recorder: Recorder,
        call: Call,
        index: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        device: torch.device,
        copy_of: LazyTensor | None = None,
    ) -> None:
        super().__init__(recorder, dtype, sizes, strides, device)
        self.call = call
        self.index = index
        self.copy_of = copy_of


def real_view(node: Node, like: torch.Tensor) -> torch.Tensor:
    """The part of a node's real value that a lazy tensor shows; shares the value's memory."""
    assert node.real is not None
    return _restride(node.real, like)


def _restride(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if value.dtype != like.dtype:
        # Bit casts were made of dense values only (`Tensor.view(dtype)` demands it).
        value = value.as_strided((value.numel(),), (1,), value.storage_offset()).view(like.dtype)
    offset = value.storage_offset() + int(like.storage_offset())
    return value.as_strided(like.shape, like.stride(), offset)


def leaves(lazy: LazyTensor) -> dict[int, LazyTensor]:
    """The lazy tensors over files (or over real values) that a value is made of, by id."""
    found: dict[int, LazyTensor] = {}
    seen: set[int] = set()
    stack = [lazy]
    while stack:
        current = stack.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        node = current.node
        if isinstance(node, ExprNode) and node.real is None:
            stack.extend(node.call.inputs())
        elif node.real is None:
            found[id(current)] = current
    return found


def value_of(lazy: LazyTensor, leaf_value: Callable[[LazyTensor], torch.Tensor]) -> torch.Tensor:
    """Compute a lazy tensor from its leaves.

    Args:
        leaf_value: gives the real tensor for a lazy tensor over a file: same sizes and dtype.

    Returns:
        A real tensor with the sizes, dtype and order of strides of `lazy`.
    """
    node = lazy.node
    if node.real is not None:
        return real_view(node, lazy)
    if not isinstance(node, ExprNode):
        return leaf_value(lazy)
    call = node.call
    if call.outputs is None:
        from fastload_common.trace.lazy_tensor import LazyTensor

        flat, spec = tree_flatten((call.args, call.kwargs))
        flat = [
            value_of(value, leaf_value) if isinstance(value, LazyTensor) else value
            for value in flat
        ]
        args, kwargs = tree_unflatten(flat, spec)
        result = call.func(*args, **kwargs)
        call.outputs = list(result) if isinstance(result, list | tuple) else [result]
    return _restride(_laid_out(call.outputs[node.index], node), lazy)


def _laid_out(value: torch.Tensor, node: Node) -> torch.Tensor:
    """The value with the strides that were foretold; views were computed from those."""
    dense = value.storage_offset() == 0 and tuple(value.stride()) == node.strides
    if dense:
        return value
    laid_out = torch.empty_strided(node.sizes, node.strides, dtype=value.dtype, device=value.device)
    return laid_out.copy_(value)
