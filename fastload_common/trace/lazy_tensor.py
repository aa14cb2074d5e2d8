"""A tensor that stands for a strided view of a tensor in the checkpoint and holds no byte.

View operations change its geometry only; `param.copy_(lazy)` is recorded; what needs a value
reads it. All decisions are the recorder's; this class only brings torch's calls to it.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch

from fastload_common.plan.geometry import View
from fastload_common.trace.misfit import misfit
from fastload_common.trace.nodes import Node, Owner

__all__ = ["LazyTensor", "restrided"]


class LazyTensor(torch.Tensor):
    """Wrapper subclass: sizes, strides, offset and dtype are real, the data is not.

    Operations that torch does not dispatch (numpy, data_ptr, pickling, ...) are overridden
    here: they read the value.

    Attributes:
        node: the value that this is a view of.
        view_in_node: sizes, strides and offset, in elements of this tensor's dtype. The same as
            `shape`, `stride()` and `storage_offset()`, which cost a call into torch each.
    """

    node: Node
    view_in_node: View

    # Python-level hooks cost a microsecond per call and show nothing that dispatch does not.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        node: Node,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        dtype: torch.dtype | None = None,
    ) -> LazyTensor:
        lazy: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            sizes,
            strides=strides,
            storage_offset=offset,
            dtype=dtype or node.dtype,
            device=node.device,
        )
        lazy.node = node
        lazy.view_in_node = View(sizes, strides, offset)
        return lazy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached only where no recording mode is active: another thread, or after the load.
        recorder = _recorder_of(args, kwargs)
        return recorder.dispatch_foreign(func, args, kwargs or {})

    def materialize(self) -> torch.Tensor:
        """The value as a real tensor that shares memory with other reads of this node."""
        self.node.recorder.materialize(self.node)
        return self.real_view()

    def real_view(self) -> torch.Tensor:
        """The part of the node's real value that this shows; only where there is one."""
        assert self.node.real is not None
        return restrided(self.node.real, self)

    def narrow(self, dim: int, start: Any, length: int) -> torch.Tensor:  # type: ignore[override]
        # The one operation that every weight loader runs; a tenth of the dispatched cost.
        sizes, strides, offset = self.view_in_node
        if (
            self.node.real is None
            and type(start) is int
            and type(length) is int
            and -len(sizes) <= dim < len(sizes)
            and 0 <= start <= start + length <= sizes[dim]
        ):
            if dim < 0:
                dim += len(sizes)
            new_sizes = (*sizes[:dim], length, *sizes[dim + 1 :])
            offset += start * strides[dim]
            return LazyTensor(self.node, new_sizes, strides, offset, self.dtype)
        try:
            return super().narrow(dim, start, length)
        except (RuntimeError, IndexError) as error:
            raise misfit(self.node, str(error)) from error

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def data_ptr(self) -> int:
        return self.materialize().data_ptr()

    def const_data_ptr(self) -> int:
        return self.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.materialize().untyped_storage()

    def storage(self) -> Any:
        return self.materialize().storage()  # type: ignore[no-untyped-call]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.materialize(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else repr(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, of={self.node!r})"

    def share_memory_(self) -> NoReturn:
        raise RuntimeError("a tensor of the checkpoint cannot be moved to shared memory")


def restrided(value: torch.Tensor, like: LazyTensor) -> torch.Tensor:
    """The part of a node's dense value that a lazy tensor over that node shows; no copy."""
    if value.dtype != like.dtype:
        # Bit casts were made of dense values only (`Tensor.view(dtype)` demands it).
        whole_bytes = value.nbytes - value.nbytes % like.dtype.itemsize
        count = whole_bytes // value.element_size()
        value = value.as_strided((count,), (1,), value.storage_offset()).view(like.dtype)
    sizes, strides, offset = like.view_in_node
    return value.as_strided(sizes, strides, value.storage_offset() + offset)


def _recorder_of(args: Any, kwargs: Any) -> Owner:
    from torch.utils._pytree import tree_leaves

    for value in tree_leaves((args, kwargs)):
        if isinstance(value, LazyTensor):
            return value.node.recorder
    raise AssertionError("dispatched without a lazy tensor")
