"""One process that stands for any rank of any parallel layout of vLLM. Imported in the worker only.

Groups have torch's fake backend: they know ranks and sizes, and their collectives do nothing.
That is all that building a model and loading its weights asks of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Layout", "engine_config", "place_of", "prepare", "rank_of"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel dimensions; experts are spread over all ranks where `experts` is."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False

    @property
    def replica_size(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tensor * self.pipeline

    @property
    def world_size(self) -> int:
        return self.replica_size * self.data


def prepare() -> None:
    """Let vLLM make groups of the fake backend. Once, before anything else."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.model_executor.models import registry

    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as the CPU worker does
    os.environ["VLLM_DIST_IDENT"] = "cases"
    state: Any = parallel_state
    new_group, make = dist.new_group, state.init_model_parallel_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **(kwargs | {"backend": "fake"}))

    def without_queue(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **(kwargs | {"use_message_queue_broadcaster": False}))

    dist.new_group = fake_group
    state.init_model_parallel_group = without_queue
    # These two ask the other ranks.
    state.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)
    # It looks at each new architecture in a process of its own, which takes seconds.
    looks: Any = registry
    looks._run_in_subprocess = lambda look: look()
    communicator: Any = cpu_communicator.CpuCommunicator
    communicator._all_group_ranks_share_shm_group_name = lambda self: False


def engine_config(model: str, load_format: str, layout: Layout, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plain = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}
    return EngineArgs(
        model=model,
        load_format=load_format,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        data_parallel_size=layout.data,
        enable_expert_parallel=layout.experts,
        distributed_executor_backend="mp",
        **(plain | more),
    ).create_engine_config()


@contextmanager
def rank_of(
    layout: Layout, rank: int, config: Any = None, local_rank: int | None = None
) -> Iterator[Any]:
    """Be one rank while the block runs, with this configuration as the engine's current one.

    Args:
        rank: among all of the world, data-parallel replicas included.
        local_rank: among those of its node; default: all are on one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if config is None:
        config = VllmConfig()
        # All that single layers ask of it.
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, model="none", is_moe=True)
    replica = rank // layout.replica_size
    config.parallel_config.data_parallel_rank = replica
    config.parallel_config.data_parallel_rank_local = replica
    world_size = layout.world_size
    within = rank % layout.replica_size
    local_rank = rank if local_rank is None else local_rank
    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(
                layout.replica_size, within, "tcp://127.0.0.1:1", local_rank, backend="fake"
            )
            parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
            yield config
    finally:
        config.compilation_config.static_forward_context.clear()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()


def place_of(
    rank: int, local_rank: int, nodes: int = 1, tensor: int = 1, data: int = 1
) -> dict[str, Any]:
    """How the adapter understands where a rank stands: the fields of its `RankPlace`."""
    from dataclasses import asdict

    from vllm.config import ParallelConfig, VllmConfig

    from fastload_vllm.port import rank_place

    sizes = Layout(tensor=tensor, data=data)
    config = VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=sizes.tensor,
            data_parallel_size=sizes.data,
            data_parallel_size_local=sizes.data,
            nnodes=nodes,
            distributed_executor_backend="mp",
        )
    )
    with rank_of(sizes, rank, config, local_rank):
        return asdict(rank_place())
