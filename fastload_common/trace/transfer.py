"""One recorded copy: which part of which real tensor takes which part of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastload_common.plan.geometry import View

if TYPE_CHECKING:
    from fastload_common.trace.lazy_tensor import LazyTensor

__all__ = ["Transfer", "destination_view", "storage_key"]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a real tensor, valid while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def destination_view(tensor: torch.Tensor) -> View:
    """Sizes, strides and offset of a real tensor in its storage."""
    return View(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


class Transfer:
    """``destination.copy_(source)``, recorded and not yet done.

    Attributes:
        destination: real tensor; keeps its memory alive.
        source: the lazy tensor, already expanded to the destination's sizes.
        view: the destination's place in its storage, in elements.
        start, end: bytes of the storage between the first and the last touched one.
        done: whether the bytes are in place.
    """

    __slots__ = ("destination", "done", "end", "key", "source", "start", "view")

    def __init__(self, destination: torch.Tensor, source: LazyTensor) -> None:
        self.destination = destination
        self.source = source
        self.view = destination_view(destination)
        itemsize = destination.dtype.itemsize
        self.start = self.view.offset * itemsize
        self.end = self.start + self.view.span * itemsize
        self.key = storage_key(destination)
        self.done = False
