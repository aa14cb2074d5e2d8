"""After a load nothing in the model may be lazy any more. Finds what is, and makes it real."""

from __future__ import annotations

from typing import Any

import torch

from fastload_common.errors import TraceError
from fastload_common.trace.lazy_tensor import LazyTensor

__all__ = ["replace_lazy_attributes"]


def replace_lazy_attributes(model: torch.nn.Module) -> int:
    """Replace lazy tensors that a model's modules kept: parameters, buffers, plain attributes.

    One that several modules share stays shared; attributes that were set on it are carried over.

    Returns:
        How many were replaced.

    Raises:
        TraceError: a parameter has no memory: a lazy tensor got into it unseen.
    """
    replaced: dict[int, tuple[LazyTensor, torch.Tensor]] = {}
    for name, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (
            module._parameters,
            module._buffers,
            module.__dict__,
        )
        for table in tables:
            for key, value in list(table.items()):
                if isinstance(value, LazyTensor):
                    if id(value) not in replaced:
                        is_parameter = table is module._parameters
                        replaced[id(value)] = (value, _real(value, is_parameter))
                    table[key] = replaced[id(value)][1]
                elif isinstance(value, torch.Tensor) and _without_memory(value):
                    raise TraceError(
                        f"{name}.{key} was given a tensor of the checkpoint in another thread",
                        hint="set FASTLOAD_TRACE=eager for this model",
                    )
    return len(replaced)


_OWN_ATTRIBUTES = ("node", "view_in_node")


def _real(lazy: LazyTensor, is_parameter: bool) -> torch.Tensor:
    real = lazy.materialize()
    if is_parameter:
        real = torch.nn.Parameter(real, requires_grad=lazy.requires_grad)
    for key, value in lazy.__dict__.items():
        if key not in _OWN_ATTRIBUTES and not key.startswith("_"):
            setattr(real, key, value)
    return real


def _without_memory(tensor: torch.Tensor) -> bool:
    return (
        not torch.nn.parameter.is_lazy(tensor)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not tensor.is_meta
        and tensor.data_ptr() == 0
    )
