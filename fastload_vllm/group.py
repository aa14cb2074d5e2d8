"""The processes that load a model together with this one, reached over vLLM's CPU groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from fastload_vllm import compat

__all__ = ["CpuGroup", "loading_group"]


class CpuGroup:
    """See `fastload_common.exchange.group.RankGroup`.

    Args:
        coordinator: one of vLLM's groups.
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


def loading_group(model_config: Any) -> CpuGroup | None:
    """Those that load this model now; None where nobody else surely does.

    When an engine starts, every rank of its world loads the model: replicas of a mixture of experts
    (data parallel) included, which are one world. Replicas of other models are worlds of their
    own. Three cases are smaller, and there the ranks of one pipeline stage are taken:

    - a draft model is loaded by the last pipeline stage only;
    - a launcher's world may hold replicas that load when they like;
    - an elastic world has ranks that come later, and no group that torch knows.
    """
    config = compat.CURRENT_CONFIG.get()()
    if config is None:
        return None
    parallel = config.parallel_config
    group = compat.WORLD_GROUP.get()()
    if (
        (model_config.runner == "draft" and parallel.pipeline_parallel_size > 1)
        or group.world_size != parallel.world_size_across_dp
        or parallel.enable_elastic_ep
    ):
        group = compat.TP_GROUP.get()()
    return CpuGroup(group) if group.world_size > 1 else None
