"""The books of a trace: which copies are recorded, which are done, which must be done now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.pending import PendingWrites
from fastload_common.trace.schema import READS_NO_VALUES, Effect, effect_of
from fastload_common.trace.transfer import Transfer, storage_key

__all__ = ["Ledger", "Resolver", "flat_arguments"]


class Resolver(Protocol):
    """Brings bytes. Called by the recorder from the tracing thread (or under its lock)."""

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Do the transfers, in any order; they do not overlap."""
        ...

    def read(self, lazy: LazyTensor) -> torch.Tensor:
        """A real tensor with the value, sizes and stride order of a lazy one."""
        ...


class Ledger:
    """Recorded transfers. Not thread-safe: the recorder holds its lock.

    Attributes:
        pending: what is recorded and not done, by memory.
        recorded_count: transfers ever recorded.
        settled_count: transfers that had to be done during the trace.
    """

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._transfers: list[Transfer] = []
        self._done_count = 0
        self._exposed: set[int] = set()
        self.pending = PendingWrites()
        self.recorded_count = 0
        self.settled_count = 0

    @property
    def transfers(self) -> list[Transfer]:
        """What is recorded and not done, in order."""
        return [transfer for transfer in self._transfers if not transfer.done]

    def record(self, transfer: Transfer) -> None:
        """Enter a new transfer; what it overwrites comes first, or not at all."""
        overlapping = self.pending.overlapping_transfer(transfer)
        if overlapping:
            self._supersede(overlapping, transfer)
        self._transfers.append(transfer)
        self.pending.add(transfer)
        self.recorded_count += 1
        if transfer.key in self._exposed:
            self.settle([transfer])

    def close(self) -> None:
        """Forget everything; nothing is recorded any more."""
        self._transfers = []
        self._exposed = set()
        self.pending = PendingWrites()

    def expose(self, tensor: torch.Tensor) -> None:
        """Somebody knows the address of a tensor's memory: fill it now, and from now on at once.

        Whoever has an address (numpy, a kernel) reads and writes there unseen.
        """
        self.settle(self.pending.in_storage(tensor))
        # Not kept alive: a loader may look at the values of all tensors, one after the other. Other
        # memory may get the key later; what is copied there is then done at once for nothing.
        self._exposed.add(storage_key(tensor))

    def touched_by(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation reads or writes memory that is still to be filled."""
        return any(
            self.pending.overlapping(value)
            for value in flat_arguments(args, kwargs)
            if isinstance(value, torch.Tensor)
        )

    def settle_touched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Do what an operation on real tensors would read or write."""
        if not self.pending or func in READS_NO_VALUES or effect_of(func) is Effect.VIEW:
            return
        for value in flat_arguments(args, kwargs):
            if isinstance(value, torch.Tensor) and type(value) is not LazyTensor:
                self.settle(self.pending.overlapping(value))

    def settle(self, transfers: list[Transfer]) -> None:
        """Do transfers now."""
        if not transfers:
            return
        self.settled_count += len(transfers)
        self._resolver.run(transfers)
        self.forget(transfers)

    def forget(self, transfers: Iterable[Transfer]) -> None:
        """Take done transfers out of the books."""
        transfers = list(transfers)
        self.pending.discard(transfers)
        for transfer in transfers:
            transfer.done = True
        # They keep tensors alive: dropped when they are half of the list, in one go.
        self._done_count += len(transfers)
        if self._done_count > len(self._transfers) // 2:
            self._transfers = self.transfers
            self._done_count = 0

    def _supersede(self, earlier: list[Transfer], transfer: Transfer) -> None:
        """Drop what a new transfer overwrites as a whole; do what it overwrites in part."""
        dtype = transfer.destination.dtype
        dropped = [
            old for old in earlier if old.view == transfer.view and old.destination.dtype == dtype
        ]
        self.settle([old for old in earlier if old not in dropped])
        self.forget(dropped)


def flat_arguments(args: Any, kwargs: dict[str, Any]) -> Iterable[Any]:
    """The arguments of an operation, those in lists too."""
    if not kwargs and not any(isinstance(value, list | tuple | dict) for value in args):
        return args  # type: ignore[no-any-return]
    return tree_leaves((args, kwargs))
