"""How the recorder comes to see what the engine's code does, in one thread."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastload_common.errors import TraceError
from fastload_common.trace.lazy_tensor import LazyTensor

__all__ = ["DispatchMode", "FunctionMode"]


class SeesOperations(Protocol):
    """The recorder, as the modes know it."""

    changed_by: str | None

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do one operation, or record it."""
        ...

    def record_copy(self, destination: torch.Tensor, source: LazyTensor) -> torch.Tensor:
        """``destination.copy_(source)`` into a real tensor."""
        ...

    def expose(self, tensor: torch.Tensor) -> None:
        """The address of a real tensor is being taken."""
        ...


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Brings every operation of this thread to the recorder."""

    def __init__(self, recorder: SeesOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's hook: without it each call goes through a wrapper that imports the compiler.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._recorder.dispatch(func, args, kwargs or {})


_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_PLAIN_VIEWS = frozenset({_GET_DATA, torch.Tensor.narrow, torch.Tensor.__getitem__})
_TAKES_ADDRESS = frozenset(
    {
        torch.Tensor.data_ptr,
        torch.Tensor.numpy,
        torch.Tensor.tolist,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__deepcopy__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.share_memory_,
        torch.Tensor.storage,
        torch.Tensor.untyped_storage,
    }
)
_COPY = torch.Tensor.copy_
_SPECIAL = _PLAIN_VIEWS | _TAKES_ADDRESS | {_SET_DATA, _COPY, torch.from_numpy}


class FunctionMode(TorchFunctionMode):
    """Sees the few calls that torch does not dispatch, and shortens the most frequent ones."""

    def __init__(self, recorder: SeesOperations) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SPECIAL:
            first = args[0]
            if func in _PLAIN_VIEWS:
                if _is_plain(first) and (len(args) == 1 or _is_plain_index(args[1:])):
                    # A view of a real tensor touches no data: the dispatch mode need not see it.
                    with torch._C._DisableTorchDispatch():
                        return func(*args, **kwargs) if kwargs else func(*args)
            elif func is _COPY:
                if (
                    not kwargs
                    and type(args[1]) is LazyTensor
                    and _is_plain(first)
                    and not (first.requires_grad and torch.is_grad_enabled())
                ):
                    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
                        return self._recorder.record_copy(first, args[1])
            elif func == _SET_DATA:
                if type(first) is LazyTensor:
                    raise TraceError("a loaded tensor is given other memory")
                self._recorder.changed_by = self._recorder.changed_by or "param.data = ..."
                if type(args[1]) is LazyTensor:
                    # The parameter takes over the loaded tensor itself: it must be a real one.
                    args = (first, args[1].materialize())
            elif func is torch.from_numpy:
                made = func(*args)
                self._recorder.expose(made)
                return made
            elif type(first) is not LazyTensor:
                self._recorder.expose(first)
        return func(*args, **kwargs) if kwargs else func(*args)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether nobody but torch itself has a say in this tensor's operations."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _is_plain_index(index: tuple[Any, ...]) -> bool:
    return all(
        type(part) is int or type(part) is slice or (type(part) is tuple and _is_plain_index(part))
        for part in index
    )
