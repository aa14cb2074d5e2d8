"""The real vLLM in one process of several: loads a model and keeps a digest of all its tensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.bits import bytes_of
from tests.sweep import absent, kernels

Digest = tuple[str, str, str]
"""dtype, shape, digest of the bytes."""


def describe() -> dict[str, str]:
    import transformers
    import vllm

    return {"vllm": vllm.__version__, "transformers": transformers.__version__}


@dataclass
class Loaded:
    """What one load left: digests right after the weights were loaded, and at the end."""

    raw: dict[str, Digest] = field(default_factory=dict)
    final: dict[str, Digest] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    own_bytes: int = 0  # of this rank's parameters
    refused: str | None = None  # why the engine could not post-process on this machine
    moe: bool = False
    pipeline: bool = False
    stand_ins: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return {
            "tensors": len(self.raw) + len(self.final),
            "untouched": self.untouched[:8],
            "untouched_count": len(self.untouched),
            "own_bytes": self.own_bytes,
            "refused": self.refused,
            "stand_ins": self.stand_ins,
            "moe": self.moe,
            "pipeline": self.pipeline,
        }

    def compare(self, other: Loaded) -> dict[str, Any]:
        different = []
        for label in ("raw", "final"):
            mine, others = getattr(self, label), getattr(other, label)
            names = sorted(set(mine) | set(others))
            different += [f"{label} {n}" for n in names if mine.get(n) != others.get(n)]
        if self.refused != other.refused:
            different.append(f"post-processing: {self.refused} / {other.refused}")
        return {"different": different[:20], "different_count": len(different)}


class Engine:
    """The engine's groups in this process; layouts may change from load to load."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._layout: dict[str, Any] | None = None
        self._report = Path(os.environ["FASTLOAD_REPORT"])
        os.environ["LOCAL_RANK"] = str(rank)
        # Not the same on all ranks: else each group maps shared memory that it never gives back.
        os.environ["VLLM_DIST_IDENT"] = f"sweep-{port}-{rank}"
        torch.accelerator.empty_cache = lambda: None  # the CPU worker does the same
        absent.stand_in()
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import init_distributed_environment

        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(
                world_size, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
            )
        _inspect_in_this_process()
        kernels.stand_in()
        # What no loader fills is then the same in every load, and can be told from the rest.
        torch.use_deterministic_algorithms(True, warn_only=True)

    def config(self, command: dict[str, Any], load_format: str) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        layout = command["layout"]
        arguments = {
            "model": command["directory"],
            "load_format": load_format,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "disable_log_stats": True,
            "distributed_executor_backend": "mp",
            **layout,
            **command.get("engine", {}),
        }
        if draft := command.get("draft"):
            where = draft.get("model") and str(Path(command["directory"], draft["model"]))
            arguments["speculative_config"] = {
                "num_speculative_tokens": 1,
                **draft,
                **({"model": where} if where else {}),
            }
        if layout.get("data_parallel_size", 1) > 1:
            arguments["data_parallel_rank"] = self.rank
        with kernels.balancing(layout.get("enable_eplb", False)):
            return EngineArgs(**arguments).create_engine_config()

    def arrange(self, layout: dict[str, Any]) -> None:
        """Make the process groups of a layout, unless they are there."""
        if layout == self._layout:
            return
        from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import destroy_model_parallel, initialize_model_parallel

        destroy_model_parallel()
        self._layout = None
        parallel = ParallelConfig(data_parallel_size=layout.get("data_parallel_size", 1))
        # Without a model the expert-parallel group is made too.
        with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
            initialize_model_parallel(
                layout.get("tensor_parallel_size", 1), layout.get("pipeline_parallel_size", 1)
            )
        self._layout = layout

    @contextlib.contextmanager
    def building(self, command: dict[str, Any]) -> Iterator[Callable[[], Any]]:
        """Give a function that makes the model and loads nothing; the model may be used inside."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        self.arrange(command["layout"])
        config = self.config(command, "dummy")

        def build() -> Any:
            _forget_models()
            torch.manual_seed(0)
            config.compilation_config.static_forward_context.clear()
            return initialize_model(config, model_config=_model_config(config))

        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            yield build
        config.compilation_config.static_forward_context.clear()

    def load(self, command: dict[str, Any], load_format: str) -> Loaded:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model

        self.arrange(command["layout"])
        config = self.config(command, load_format)
        loaded = Loaded()
        kernels.used.clear()
        _forget_models()
        self._report.unlink(missing_ok=True)
        torch.manual_seed(0)
        with set_current_vllm_config(config), _watched(loaded):
            model = get_model(vllm_config=config, model_config=_model_config(config))
            if command.get("reload"):
                _reload(config, model)
        if loaded.refused is None:
            loaded.final = {name: digest(tensor) for name, tensor in tensors_of(model)}
        loaded.stand_ins = sorted(kernels.used)
        told = _model_config(config)
        loaded.moe = bool(told.is_moe)
        loaded.pipeline = config.speculative_config is None and bool(
            told.registry.is_pp_supported_model(told.architectures, told)
        )
        config.compilation_config.static_forward_context.clear()
        if load_format == "fastload":
            reports = self._report.read_text().splitlines()
            assert len(reports) == 1 + bool(command.get("reload"))
            loaded.report = json.loads(reports[0])
        return loaded


def _model_config(config: Any) -> Any:
    """Of the model that is loaded: the draft where there is one."""
    speculative = config.speculative_config
    return config.model_config if speculative is None else speculative.draft_model_config


def _forget_models() -> None:
    """The engine remembers by `id` which layers a model lacks; here one follows another."""
    from vllm.model_executor.models import utils

    utils._model_to_pp_missing_layer_names.clear()


def _inspect_in_this_process() -> None:
    """Look at model classes here: the engine starts a process for each (10 s), and caches it."""
    from vllm.model_executor.models import registry

    def inspect(lazy: Any) -> Any:
        return registry._ModelInfo.from_model_cls(lazy.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def _reload(config: Any, model: torch.nn.Module) -> None:
    """Load again, in place, as the engine's `reload_weights` does."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0)
    reload_weights(config, model, None, None, is_checkpoint_format=True)


class _watched:  # noqa: N801
    """Takes digests between loading and post-processing, and notes where that fails."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def __enter__(self) -> None:
        from vllm.model_executor.model_loader import base_loader

        self._module = base_loader
        self._original = base_loader.process_weights_after_loading
        base_loader.process_weights_after_loading = self._process

    def __exit__(self, *_: object) -> None:
        self._module.process_weights_after_loading = self._original

    def _process(self, model: Any, *arguments: Any) -> None:
        for name, tensor in tensors_of(model):
            self._loaded.raw[name] = digest(tensor)
            self._loaded.own_bytes += tensor.nbytes if isinstance(tensor, torch.nn.Parameter) else 0
            if is_untouched(tensor):
                self._loaded.untouched.append(name)
        try:
            self._original(model, *arguments)
        except Exception as error:
            self._loaded.refused = f"{type(error).__name__}: {str(error).strip()[:200]}"


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter, buffer and tensor attribute, with its name."""
    for path, part in module.named_modules():
        for table in (part._parameters, part._buffers, vars(part)):
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}", value


def digest(tensor: torch.Tensor) -> Digest:
    assert type(tensor).__name__ != "LazyTensor"
    if tensor.is_meta:
        return str(tensor.dtype), str(tuple(tensor.shape)), "meta"
    if tensor.layout is not torch.strided:
        return str(tensor.dtype), str(tuple(tensor.shape)), str(tensor.layout)
    found = hashlib.sha256(bytes_of(tensor)).hexdigest()
    return str(tensor.dtype), str(tuple(tensor.shape)), found


def is_untouched(tensor: torch.Tensor) -> bool:
    """Whether it holds nothing but what torch fills new memory with."""
    if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return False
    tensor = tensor.detach()
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor.float()).all())
    if tensor.dtype in (torch.bool,) or tensor.is_complex():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())
