"""What a lazy tensor stands for: a tensor in the checkpoint, or a computation over such.

A node is the "storage" of lazy tensors: all views of one loaded tensor share its node, so an
in-place write through one view is seen by the others, as with real tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.plan.geometry import View, contiguous_strides
from fastload_common.plan.records import TensorRead

if TYPE_CHECKING:
    from fastload_common.trace.lazy_tensor import LazyTensor

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
        real: the value once it had to exist (read early, or written to), else None. Operations
            on lazy tensors then run on it. What was recorded before does not: that is evaluated
            from the checkpoint, which never changes.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "dtype",
        "real",
        "recorder",
        "sizes",
        "strides",
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
    """One operation of the engine that is not a view, kept to be run when its inputs are there.

    Attributes:
        default_dtype: torch's default at that time, on which some results depend.
        outputs: its results while a resolver evaluates it.
    """

    __slots__ = ("args", "default_dtype", "func", "kwargs", "outputs")

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.default_dtype = torch.get_default_dtype()
        self.outputs: list[Any] | None = None


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
