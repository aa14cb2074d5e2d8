"""A tensor as the bytes that are compared and hashed."""

from __future__ import annotations

import torch


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's elements, in order, from whatever device and with whatever strides."""
    # Not `contiguous()`: it returns a tensor of one element as it is, whatever its strides, and one
    # of stride 0 (engines expand scales so) cannot be seen as bytes.
    copied = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return copied.view(-1).view(torch.uint8).numpy().tobytes()
