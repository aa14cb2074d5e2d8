"""Put the bytes of one read into one real tensor, chunk by chunk as they come.

Three ways, chosen once per read:

- *typed*: elements are aligned and no element straddles two chunks (the planner's alignment
  sees to that): the part of the view that a chunk holds is copied as torch copies strided
  tensors, a cast included;
- *bytes*: the data is not aligned to its dtype in the object: the same, element by byte;
- *raw*: the view is neither of both (expanded, overlapping, unaligned and cast): its whole
  extent is gathered first, then copied.

Knows torch and views, not names of tensors, URIs or requests. `Placement.take` writes by torch's
own copies; a backend for a device takes the pieces instead, and copies them in its own way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import torch

from fastload_common.plan.geometry import Box, View, nested, ordered
from fastload_common.plan.pieces import Piece, pieces
from fastload_common.plan.records import TensorRead

__all__ = ["ChunkBytes", "Placement"]


class ChunkBytes:
    """The bytes of one chunk as tensors. Valid while its staging slot is leased.

    Args:
        data: the slot's memory, aligned to at least 64 bytes; only read, so another rank's will do.
        start: where the chunk begins in its object.
    """

    __slots__ = ("_raw", "_typed", "data", "end", "start")

    def __init__(self, data: memoryview, start: int) -> None:
        self.data = data  # holds the memory that the tensors show
        self._raw = torch.frombuffer(_buffer(data), dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {torch.uint8: self._raw}
        self.start = start
        self.end = start + len(data)

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """One-dimensional view of the bytes in another dtype (a rest is cut off)."""
        typed = self._typed.get(dtype)
        if typed is None:
            whole = len(self._raw) // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = self._raw[:whole].view(dtype)
        return typed


class Placement:
    """One read on its way into one destination.

    Args:
        read: which bytes.
        dtype: what these bytes are.
        destination: real tensor with the sizes of ``read.view``, or None for a new one on the
            host with the stride order of the view.
    """

    __slots__ = ("_at", "_box", "_destination", "_dtype", "_own", "_raw", "_unit", "_view", "read")

    def __init__(
        self, read: TensorRead, dtype: torch.dtype, destination: torch.Tensor | None = None
    ) -> None:
        self.read = read
        self._dtype = dtype
        self._destination = destination
        self._own = destination is None
        # An expanded dimension of our own is filled once.
        sizes, strides, offset = read.view
        if self._own:
            sizes = tuple(n if s else min(n, 1) for n, s in zip(sizes, strides, strict=True))
        self._view = View(sizes, strides, offset)
        self._raw: torch.Tensor | None = None
        self._box: Box | None = None
        self._at: torch.Tensor | None = None
        self._unit = dtype  # of which the box counts its elements

    def take(self, chunk: ChunkBytes) -> None:
        """Copy what a chunk holds of this read. Each chunk of the read must come once."""
        destination = self.target()
        if destination is None:
            assert self._raw is not None
            self._gather(self._raw, chunk)
            return
        source = chunk.typed(self._unit)
        for piece in self.cut(chunk):
            destination.as_strided(piece.sizes, piece.dst_strides, piece.dst_offset).copy_(
                source.as_strided(piece.sizes, piece.src_strides, piece.src_offset)
            )

    @property
    def device(self) -> torch.device | None:
        """Where the destination is; None: on the host, and made here."""
        if self._own or self._destination is None:
            return None
        return self._destination.device

    @property
    def unit(self) -> torch.dtype:
        """Of the elements that `cut` counts in, on the source side; only after `target`."""
        return self._unit

    def target(self) -> torch.Tensor | None:
        """What the pieces of `cut` go into; None: the read is gathered first, by `take`."""
        if self._at is None and self._raw is None:
            self._prepare()
        return self._at

    def cut(self, chunk: ChunkBytes) -> Iterator[Piece]:
        """What a chunk holds of this read; only where there is a `target`.

        Yields:
            Pieces whose source offset counts from the chunk's first byte, in units, and whose
            destination offset counts from the start of the target's storage.
        """
        assert self._box is not None
        assert self._at is not None
        unit, read = self._unit.itemsize, self.read
        # Where the read begins in the chunk; may lie before it.
        first = (read.data_start - chunk.start) // unit
        first += read.view.offset * (read.itemsize_bytes // unit)
        end = (chunk.end - chunk.start) // unit
        return pieces(self._box, first, int(self._at.storage_offset()), 0, end)

    def finish(self) -> torch.Tensor:
        """After the last chunk: the destination, complete."""
        read = self.read
        sizes, strides, _ = read.view
        if self._raw is not None:
            value = self._raw.view(self._dtype).as_strided(sizes, strides, 0)
            target = value if self._own else self._made().copy_(value)
        else:
            target = self._made()
            if self._own:
                target = target.as_strided(sizes, strides, 0)
        # Private memory is the caller's now.
        self._raw = self._at = self._destination = None
        return target

    def _made(self) -> torch.Tensor:
        if self._destination is None:
            # The strides of the view itself: sums depend on the order in which memory lies.
            view = self._view
            flat = torch.empty(view.span, dtype=self._dtype, device="cpu")
            self._destination = flat.as_strided(view.sizes, view.strides, 0)
        return self._destination

    def _prepare(self) -> None:
        read = self.read
        view, itemsize = self._view, read.itemsize_bytes
        destination = self._destination
        strides = view.strides if destination is None else tuple(destination.stride())
        box = ordered(view.sizes, view.strides, strides)
        if nested(box.sizes, box.src_strides):
            if read.data_start % itemsize == 0:
                self._at, self._box = self._made(), box
                return
            if destination is None or destination.dtype == self._dtype:
                self._at, self._unit = _as_bytes(self._made()), torch.uint8
                self._box = ordered(
                    (*view.sizes, itemsize),
                    (*(s * itemsize for s in view.strides), 1),
                    (*(s * itemsize for s in strides), 1),
                )
                return
        self._raw = torch.empty(view.span * itemsize, dtype=torch.uint8, device="cpu")

    def _gather(self, raw: torch.Tensor, chunk: ChunkBytes) -> None:
        base = self.read.data_start + self.read.view.offset * self.read.itemsize_bytes
        start, end = max(base, chunk.start), min(base + len(raw), chunk.end)
        if start < end:
            part = chunk.typed(torch.uint8)[start - chunk.start : end - chunk.start]
            raw[start - base : end - base].copy_(part)


def _buffer(data: memoryview) -> object:
    """The memory as something that torch takes without a warning that it cannot be written."""
    if not data.readonly:
        return data
    address = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return (ctypes.c_ubyte * len(data)).from_address(address)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes; its offset is where the tensor begins."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    offset_bytes = tensor.storage_offset() * tensor.element_size()
    flat.set_(storage, offset_bytes, (storage.nbytes() - offset_bytes,), (1,))
    return flat
