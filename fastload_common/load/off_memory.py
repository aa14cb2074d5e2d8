"""Build a model without its memory: what is large gets the meta device, what is small is real.

All on the meta device would be simpler, but engines compute with small tensors while they build a
model and while they load it (expert maps, position tables), and need their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastload_common.units import KIB

__all__ = ["off_memory"]

_LARGE_BYTES = 16 * KIB

# Position of the fill value or the like, after the sizes, is of no interest: sizes come first.
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})
_STRIDED = torch.empty_strided


class _OffMemory(TorchFunctionMode):
    """Decides for each new tensor where it is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES or func is _STRIDED:
            size_bytes = _size_bytes(func, args, kwargs)
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            kwargs["device"] = "meta" if size_bytes >= _LARGE_BYTES else "cpu"
        return func(*args, **kwargs)


def _size_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    sizes = args or (kwargs.get("size", ()),)
    if isinstance(sizes[0], list | tuple):
        sizes = sizes[0]
    elif func in (torch.full, _STRIDED):
        sizes = sizes[:1]
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return math.prod(int(n) for n in sizes) * int(dtype.itemsize)


@contextmanager
def off_memory() -> Iterator[None]:
    """Inside, large tensors are made on the meta device and small ones on the host.

    Whatever device is asked for: a plan must not need one.
    """
    with torch.device("cpu"), _OffMemory():
        yield
