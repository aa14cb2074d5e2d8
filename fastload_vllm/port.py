"""Facts that only vLLM knows: where this process stands, and where a model's weights are."""

from __future__ import annotations

from typing import Any

from fastload_common.engine.object_model import is_registry_uri
from fastload_common.load.session import RankPlace
from fastload_vllm import compat

__all__ = ["is_object_uri", "rank_place", "weights_root"]


def is_object_uri(model: str) -> bool:
    """Whether vLLM knows this as the URI of an object store, or we alone as a registry's."""
    return is_registry_uri(model) or bool(compat.IS_OBJECT_URI.get()(model))


def rank_place() -> RankPlace:
    """This process among those of its node that load a model.

    Ranks come from the engine's world group. Which device the weights go to is not said here:
    it is where the model's parameters are.
    """
    world = compat.WORLD_GROUP.get()()
    config = compat.CURRENT_CONFIG.get()()
    parallel = config.parallel_config if config is not None else None
    if parallel is None:
        return RankPlace(
            engine="vllm",
            engine_version=compat.engine_version(),
            rank=world.rank,
            world_size=world.world_size,
            local_rank=max(world.local_rank, 0),
            local_world_size=max(world.local_rank, 0) + 1,
        )
    ranks = max(1, parallel.local_world_size)
    replicas = max(1, parallel.data_parallel_size_local)
    replica = min(parallel.data_parallel_rank_local or 0, replicas - 1)
    # With data parallelism the world group's local rank names a device among all replicas'.
    return RankPlace(
        engine="vllm",
        engine_version=compat.engine_version(),
        rank=world.rank,
        world_size=world.world_size,
        local_rank=replica * ranks + max(world.local_rank, 0) % ranks,
        local_world_size=replicas * ranks,
    )


def weights_root(model_config: Any) -> str:
    """Where the weights are: the URI of an object-store model, else directory or hub id.

    A draft model that lives in the target's checkpoint may be named by the target's metadata
    directory; its weights are then where the target's are.
    """
    if model_config.model_weights:
        return str(model_config.model_weights)
    config = compat.CURRENT_CONFIG.get()()
    speculative = getattr(config, "speculative_config", None)
    for other in (
        getattr(config, "model_config", None),
        getattr(speculative, "target_model_config", None),
    ):
        if other is not None and other.model_weights and other.model == model_config.model:
            return str(other.model_weights)
    return str(model_config.model)
