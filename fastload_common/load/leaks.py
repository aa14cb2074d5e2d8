"""After a load nothing in the model may be lazy any more. Finds what is, and makes it real."""

from __future__ import annotations

from typing import Any

import torch

from fastload_common.trace.lazy_tensor import LazyTensor

__all__ = ["replace_lazy_attributes"]


def replace_lazy_attributes(model: torch.nn.Module) -> int:
    """Replace lazy tensors that a model's modules kept: parameters, buffers, plain attributes.

    Returns:
        How many were replaced.
    """
    count = 0
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (
            module._parameters,
            module._buffers,
            module.__dict__,
        )
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, LazyTensor):
                    real = value.materialize()
                    if table is module._parameters:
                        real = torch.nn.Parameter(real, requires_grad=value.requires_grad)
                    table[name] = real
                    count += 1
    return count
