"""The processes that load a model together, reached over a group of the engine's on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

__all__ = ["CpuGroup"]


class CpuGroup:
    """See `fastload_common.exchange.group.RankGroup`.

    Args:
        coordinator: an engine's group: ``rank_in_group``, ``world_size`` and ``cpu_group``.
    """

    def __init__(self, coordinator: Any) -> None:
        self.rank = int(coordinator.rank_in_group)
        self.size = int(coordinator.world_size)
        self._group = coordinator.cpu_group

    def all_gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in order. Waits for all of them."""
        # Models are built with another default device.
        own = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = [torch.zeros_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(sizes, own, group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(max(longest, 1), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        torch.distributed.all_gather(parts, padded, group=self._group)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]
