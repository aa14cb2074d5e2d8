"""The processes that load a model together with this one, reached over vLLM's CPU groups."""

from __future__ import annotations

from typing import Any

from fastload_common.engine.cpu_group import CpuGroup
from fastload_vllm import compat

__all__ = ["loading_group"]


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
