"""vLLM for ``fastload plan``: its configuration and its models, for one rank without the others.

Found through the entry point group ``fastload.planners``. Importing this module imports nothing
of vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fastload_common.config import Settings
from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.errors import ConfigError, EngineUnsupportedError
from fastload_common.load.plan_job import PlanJob, Tracer
from fastload_common.load.request import WeightSource
from fastload_vllm import compat

__all__ = ["VllmPlanner", "offer_no_kernel", "planner", "said"]


# Several ranks though there may be no device; and a plan needs no tokenizer.
_UNLESS_TOLD = {"distributed_executor_backend": "mp", "skip_tokenizer_init": True}


class VllmPlanner:
    """See `fastload_common.load.plan_job.Planner`."""

    def check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise EngineUnsupportedError(
                "vllm is not installed in this environment",
                hint="run `fastload plan` where vLLM is installed: its own code makes the plan",
            )

    def prepare(self, job: PlanJob) -> PreparedVllm:
        import fastload_vllm

        fastload_vllm.register()
        arguments = compat.ENGINE_ARGUMENTS.get()
        faults = compat.missing((*compat.CONFIG_NAMES, *compat.PLANNING_NAMES))
        if faults:
            raise compat.unsupported(faults)
        try:
            config = arguments(
                model=job.uri,
                load_format=LOAD_FORMAT,
                model_loader_extra_config=dict(job.settings),
                tensor_parallel_size=job.tensor_parallel,
                pipeline_parallel_size=job.pipeline_parallel,
                enable_expert_parallel=job.expert_parallel,
                **_UNLESS_TOLD | dict(job.engine_arguments),
            ).create_engine_config()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"vLLM refuses this configuration: {said(error)}") from error
        if config.parallel_config.world_size_across_dp != job.ranks:
            raise ConfigError(
                "a plan is of the tensor- and pipeline-parallel ranks of one replica",
                hint="leave sizes of data and context parallel out",
            )
        return PreparedVllm(config)


def said(error: Exception) -> str:
    """What an error says; of one of pydantic its messages, without values and addresses."""
    details = getattr(error, "errors", None)
    if not callable(details):
        return str(error)
    return "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in details())


class PreparedVllm:
    """See `fastload_common.load.plan_job.PreparedPlan`."""

    def __init__(self, config: Any) -> None:
        from fastload_vllm.loader import FastloadModelLoader

        self._config = config
        self._loader = FastloadModelLoader(config.load_config, may_download=False)

    @property
    def settings(self) -> Settings:
        return self._loader.settings

    def expected_source(self) -> WeightSource:
        return self._loader.main_source(self._config.model_config)

    def trace(self, rank: int, tracer: Tracer) -> None:
        from fastload_vllm.loader import eager_reason
        from fastload_vllm.port import rank_place

        config = self._config
        with compat.SET_CURRENT_CONFIG.get()(config):
            _stand_in(rank, config.parallel_config)
            offer_no_kernel()
            with compat.DEFAULT_DTYPE.get()(config.model_config.dtype), tracer.building():
                model = compat.INITIALIZE_MODEL.get()(vllm_config=config)
                if _NoKernel.used:
                    tracer.note("this machine lacks kernels of the model: it could not run it")
                tracer.load(
                    model,
                    self._loader.sources(model, config.model_config),
                    model.load_weights,
                    rank_place(),
                    eager_reason(model, config.model_config),
                )


def _stand_in(rank: int, parallel: Any) -> None:
    """Make vLLM believe that this process is one rank among others, which are not there.

    vLLM divides the ranks itself; only what its groups would build on is left out. For good:
    this process does nothing else.
    """
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = parallel.world_size
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    base = compat.GROUP.get()

    class Group(base):  # type: ignore[misc,valid-type]  # vLLM is not there for the checker
        """A group whose ranks, and nothing else, are known."""

        def __init__(
            self, group_ranks: list[list[int]], local_rank: int, *args: Any, **kwargs: Any
        ) -> None:
            self.unique_name = kwargs.get("group_name") or "stand-in"
            self.rank, self.local_rank, self.device_index = rank, local_rank, local_rank
            self.ranks = next(some for some in group_ranks if rank in some)
            self.world_size = len(self.ranks)
            self.rank_in_group = self.ranks.index(rank)
            self.group_ranks = group_ranks
            self.cpu_group = self.device_group = torch.distributed.group.WORLD
            self.device = torch.device("cpu")
            self.use_device_communicator = self.use_cpu_custom_send_recv = False
            self.device_communicator = self.mq_broadcaster = None

        def __del__(self) -> None:
            pass  # nothing was opened

    module = importlib.import_module(compat.GROUP.module)
    setattr(module, compat.GROUP.path, Group)
    setattr(module, compat.NODE_COUNT.path, lambda group: 1)
    compat.INIT_DISTRIBUTED.get()(ranks, rank, "env://", rank, backend="fake")
    compat.INIT_PARALLEL.get()(
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="fake"
    )


class _NoKernel:
    """Stands where this machine has no kernel for a quantized layer: weights are the same."""

    used = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        type(self).used = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, None]:
        return True, None

    @classmethod
    def get_min_capability(cls) -> int:
        return 0


def offer_no_kernel() -> None:
    """Offer `_NoKernel` for linear layers after all kernels of vLLM."""
    for tables in compat.LINEAR_KERNELS:
        for kernels in tables.get().values():
            if _NoKernel not in kernels:
                kernels.append(_NoKernel)


planner = VllmPlanner()
