"""What a lazy tensor stands for: a tensor in the checkpoint, or a computation over such.

A node is the "storage" of lazy tensors: all views of one loaded tensor share its node, so an
in-place write through one view is seen by the others, as with real tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.plan.geometry import View, contiguous_strides
from fastload_common.plan.records import TensorRead

if TYPE_CHECKING:
    from fastload_common.trace.lazy_tensor import LazyTensor
    from fastload_common.trace.transfer import Transfer

__all__ = ["Call", "ExprNode", "FileNode", "Node", "Owner"]


_HOST = torch.device("cpu")


class Owner(Protocol):
    """The recorder, as lazy tensors know it."""

    def dispatch_foreign(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on a lazy tensor that no recording mode saw."""
        ...

    def materialize(self, node: Node) -> None:
        """Give a node its real value."""
        ...

    def track(self, node: Node) -> None:
        """Remember a new node, without keeping it alive."""
        ...


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
        recorder: Owner,
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

    def __repr__(self) -> str:
        return f"tensor {self.entry.name!r}"

    def __init__(
        self,
        recorder: Owner,
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


class ExprNode(Node):
    """One output of a `Call`.

    Attributes:
        copy_of: set if the value equals this tensor element by element, cast to `dtype`
            (clone, contiguous, to): views of it can then be taken from there.
    """

    __slots__ = ("call", "copy_of", "index")

    def __init__(
        self,
        recorder: Owner,
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

    def __repr__(self) -> str:
        return f"a result of {self.call.func}"
