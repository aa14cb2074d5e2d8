"""Which recorded transfers touch a piece of memory. Decided by extents, not by storage."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

import torch

from fastload_common.plan.geometry import View, views_overlap
from fastload_common.trace.transfer import Transfer, destination_view, storage_key

__all__ = ["PendingWrites"]

_START = attrgetter("start")


class _Storage:
    """Transfers into one storage, by where they begin."""

    __slots__ = ("longest", "transfers")

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.longest = 0


class PendingWrites:
    """Index of transfers that are recorded and not done."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def __bool__(self) -> bool:
        return bool(self._storages)

    def add(self, transfer: Transfer) -> None:
        storage = self._storages.setdefault(transfer.key, _Storage())
        rows = storage.transfers
        if not rows or rows[-1].start <= transfer.start:
            rows.append(transfer)  # weights mostly come in order
        else:
            insort(rows, transfer, key=_START)
        storage.longest = max(storage.longest, transfer.end - transfer.start)

    def discard(self, transfers: Iterable[Transfer]) -> None:
        """Forget transfers; those that are not in the index are ignored."""
        for transfer in transfers:
            storage = self._storages.get(transfer.key)
            if storage is None:
                continue
            rows = storage.transfers
            k = bisect_left(rows, transfer.start, key=_START)
            while k < len(rows) and rows[k].start == transfer.start:
                if rows[k] is transfer:
                    del rows[k]
                    break
                k += 1
            if not rows:
                del self._storages[transfer.key]

    def overlapping(self, tensor: torch.Tensor) -> list[Transfer]:
        """Transfers that write an element which the tensor shows."""
        if not self._storages:
            return []
        storage = self._storages.get(storage_key(tensor))
        if storage is None:
            return []
        view = destination_view(tensor)
        itemsize = tensor.element_size()
        start = view.offset * itemsize
        return self._overlapping(storage, view, itemsize, start, start + view.span * itemsize)

    def overlapping_transfer(self, transfer: Transfer) -> list[Transfer]:
        """Transfers in the index that write an element which a new one writes too."""
        storage = self._storages.get(transfer.key)
        if storage is None:
            return []
        itemsize = transfer.destination.dtype.itemsize
        return self._overlapping(storage, transfer.view, itemsize, transfer.start, transfer.end)

    @staticmethod
    def _overlapping(
        storage: _Storage, view: View, itemsize: int, start: int, end: int
    ) -> list[Transfer]:
        rows = storage.transfers
        found = []
        for k in range(bisect_left(rows, start - storage.longest, key=_START), len(rows)):
            row = rows[k]
            if row.start >= end:
                break
            if row.end <= start:
                continue
            same_size = row.destination.dtype.itemsize == itemsize
            if not same_size or views_overlap(row.view, view):
                found.append(row)
        return found

    def in_storage(self, tensor: torch.Tensor) -> list[Transfer]:
        """All transfers into the tensor's storage."""
        storage = self._storages.get(storage_key(tensor))
        return list(storage.transfers) if storage else []
