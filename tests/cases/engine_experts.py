"""Cases of one layer of experts, called in the worker."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.cases.engine_kernels import WNA16_EXPERTS, without_kernels
from tests.cases.engine_layers import FIRST_NUMBER, compare_layers, numbered
from tests.cases.engine_ranks import Layout, rank_of

HIDDEN = 32
INTERMEDIATE = 64
PARTS = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
Tensors = dict[str, torch.Tensor]


class Experts(torch.nn.Module):
    """A layer of experts as models have it, loaded by its own `load_weights`."""

    def __init__(self, experts: int, **more: Any) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        super().__init__()
        # The engine knows each layer by its name, and here it is made several times.
        get_current_vllm_config().compilation_config.static_forward_context.clear()
        plain = {"params_dtype": torch.float32, "prefix": "mlp.experts"}
        self.runner = FusedMoEFactory(experts, 2, HIDDEN, INTERMEDIATE, **(plain | more))
        with torch.no_grad():
            for param in self.parameters():
                param.view(torch.uint8).fill_(0xEE)  # what no tensor gives is the same twice

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set(self.runner.routed_experts.load_weights(weights))


def checkpoint(form: str, experts: int) -> Tensors:
    """The same numbers as one tensor for each expert, or all in one: (E, N, K) or (E, K, N)."""
    gate_up = numbered(experts, 2 * INTERMEDIATE, HIDDEN)
    down = numbered(experts, HIDDEN, INTERMEDIATE, first=gate_up.numel())
    if form == "fused":
        return {"gate_up_proj": gate_up, "down_proj": down}
    if form == "transposed":
        return {
            "gate_up_proj": gate_up.transpose(1, 2).contiguous(),
            "down_proj": down.transpose(1, 2).contiguous(),
        }
    tensors: Tensors = {}
    for expert in range(experts):
        gate, up = gate_up[expert].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
        if form == "pairs":  # gate and up as one tensor
            parts = {"gate_up_proj": gate_up[expert], "down_proj": down[expert]}
        tensors |= {f"{expert}.{part}.weight": value.clone() for part, value in parts.items()}
    return tensors


@contextmanager
def _placed(layout: Layout, rank: int, placement: str) -> Iterator[None]:
    from vllm.config import ParallelConfig, VllmConfig

    config = VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=layout.tensor,
            data_parallel_size=layout.data,
            enable_expert_parallel=layout.experts,
            expert_placement_strategy=placement,
        )
    )
    config.model_config = SimpleNamespace(dtype=torch.float32, model="none", is_moe=True)
    with rank_of(layout, rank, config):
        yield


def load_experts(
    form: str,
    experts: int,
    tensor: int,
    spread: bool,
    placement: str = "linear",
    redundant: int = 0,
    data: int = 1,
    **settings: Any,
) -> list[dict[str, Any]]:
    """One layer in one of the forms of checkpoints, on every rank; `spread` is expert parallel."""
    found = []
    layout = Layout(tensor=tensor, data=data, experts=spread)
    for rank in range(layout.world_size):
        with _placed(layout, rank, placement):

            def build() -> Experts:
                return Experts(
                    experts,
                    is_fused_checkpoint_transposed=form == "transposed",
                    enable_eplb=redundant > 0,
                    num_redundant_experts=redundant,
                    use_grouped_topk=True,
                    num_expert_group=4,
                    topk_group=2,
                )

            row = compare_layers(build, {"a": checkpoint(form, experts)}, **settings)
            model = build()
            model.load_weights(checkpoint(form, experts).items())
            found.append(row | {"digest": _digest(model), "slots": _slots(model)})
    return found


def _digest(model: Experts) -> str:
    import hashlib

    from tests.vllm.equivalence_worker import state_of

    weights = {n: v for n, v in state_of(model).items() if n.endswith("_weight")}
    return hashlib.sha256(repr(sorted(weights.items())).encode()).hexdigest()


def _slots(model: Experts) -> list[int]:
    """Which expert of the checkpoint each slot of this rank holds; -1 for none."""
    firsts = model.runner.routed_experts.w2_weight[:, 0, 0].tolist()
    # The down projections lie behind all gate and up projections.
    experts = model.runner.moe_config.num_logical_experts
    first = FIRST_NUMBER + experts * 2 * INTERMEDIATE * HIDDEN
    return [int((value - first) // (HIDDEN * INTERMEDIATE)) for value in firsts]


def nvfp4_experts(experts: int, tensor: int) -> list[dict[str, Any]]:
    """ModelOpt's NVFP4 with its scales of all experts, where each rank keeps a few experts."""
    from vllm.model_executor.layers.quantization import modelopt

    tensors = _nvfp4_checkpoint(experts)
    found = []
    for rank in range(tensor):
        with _placed(Layout(tensor=tensor, experts=True), rank, "linear"), without_kernels():
            config = modelopt.ModelOptNvFp4Config("NVFP4", True, None, [], 16)

            def build(config: Any = config) -> Experts:
                return Experts(experts, quant_config=config)

            row = compare_layers(build, {"a": tensors})
            model = build()
            model.load_weights((name, value.clone()) for name, value in tensors.items())
            scales = model.runner.routed_experts.w2_input_scale.tolist()
            found.append(row | {"input_scales": scales})
    return found


def _nvfp4_checkpoint(experts: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for expert in range(experts):
        for part, (n, k) in PARTS.items():
            name = f"{expert}.{part}."
            packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
            scale = torch.randint(0, 120, (n, k // 16), dtype=torch.uint8, generator=generator)
            tensors[name + "weight"] = packed
            tensors[name + "weight_scale"] = scale.view(torch.float8_e4m3fn)
            tensors[name + "weight_scale_2"] = torch.tensor(1.0 + expert)
            tensors[name + "input_scale"] = torch.tensor(100.0 + expert)
    return tensors


def packed_experts(experts: int, tensor: int) -> list[dict[str, Any]]:
    """4-bit experts of compressed-tensors: packed weights, their scales and shapes."""
    tensors: Tensors = {}
    generator = torch.Generator().manual_seed(0)
    for expert in range(experts):
        for part, (n, k) in PARTS.items():
            packed = torch.randint(0, 1 << 30, (n, k // 8), dtype=torch.int32, generator=generator)
            tensors[f"{expert}.{part}.weight_packed"] = packed
            tensors[f"{expert}.{part}.weight_scale"] = torch.rand(n, k // 32, generator=generator)
            tensors[f"{expert}.{part}.weight_shape"] = torch.tensor([n, k])
    found = []
    for rank in range(tensor):
        with _placed(Layout(tensor=tensor, experts=True), rank, "linear"), without_kernels():

            def build() -> Experts:
                return Experts(experts, quant_config=_packed_config())

            found.append(compare_layers(build, {"a": tensors}))
    return found


def _packed_config() -> Any:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    module = importlib.import_module(WNA16_EXPERTS)
    bits = SimpleNamespace(
        symmetric=True, num_bits=4, strategy="group", group_size=32, actorder=None
    )

    class Config(CompressedTensorsConfig):  # type: ignore[misc]
        """Four bits for each expert, whatever a checkpoint's configuration would say."""

        def __init__(self) -> None:
            pass

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return module.CompressedTensorsWNA16MoEMethod(bits, None, layer.moe_config)

    return Config()
