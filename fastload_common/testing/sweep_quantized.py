"""Quantized checkpoints: a plain one's linear weights, replaced by what a format stores for each.

Names, shapes and types are those of published checkpoints; the values are random, and no more
than loaded. Needs torch, which comes with the engine; never imported by what is shipped to run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "GROUP", "Format", "quantized"]

GROUP = 32
"""Elements of one scale. Of the rows of a rank's part there is an odd number of them."""

LINEAR = re.compile(
    r"\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3"
    r"|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.weight$"
)
FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
ROUTER = re.compile(r"^(.*\.(?:gate|router))\.weight$")

Tensors = dict[str, "torch.Tensor"]
Make = Callable[["_Random", int, int], Tensors]


@dataclass(frozen=True)
class Format:
    """One way of storing quantized weights.

    Args:
        make: (random, rows, columns) of a linear weight -> what is stored: suffix -> tensor.
        config: ``quantization_config``, without the modules that are left alone.
        skipped: the name under which it lists those.
        fused: the experts of a layer are one tensor, and only they are quantized (GPT-OSS).
        engine: arguments of the engine.
    """

    make: Make | None
    config: Mapping[str, Any]
    skipped: str = "modules_to_not_convert"
    fused: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


class _Random:
    """Random tensors of a seed."""

    def __init__(self, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)

    def bits(self, *shape: int, dtype: str = "int32") -> torch.Tensor:
        """Any bits at all: packed integers."""
        import torch

        width = getattr(torch, dtype).itemsize
        size = [*shape[:-1], shape[-1] * width]
        drawn = torch.randint(0, 256, size, generator=self._generator).to(torch.uint8)
        return drawn.view(getattr(torch, dtype))

    def values(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        """Positive values between 0.01 and 1.01: scales."""
        import torch

        drawn = torch.rand(shape, generator=self._generator) + 0.01
        return drawn.to(getattr(torch, dtype))

    def permutation(self, count: int) -> torch.Tensor:
        import torch

        return torch.randperm(count, generator=self._generator)


def quantized(plain: Tensors, form: Format, *, seed: int = 0) -> tuple[Tensors, dict[str, Any]]:
    """Replace the linear weights of a checkpoint.

    Args:
        plain: names and tensors of a checkpoint that is not quantized.
        form: one of `FORMATS`.
        seed: of the values.

    Returns:
        The tensors, and the ``quantization_config`` of the model's configuration.
    """
    random = _Random(seed)
    tensors: Tensors = {}
    for name, tensor in plain.items():
        if form.fused and FUSED.search(name):
            tensors |= _mxfp4_experts(random, name, *tensor.shape)
        elif form.make is not None and LINEAR.search(name) and tensor.ndim == 2:
            made = form.make(random, *tensor.shape)
            base = name.removesuffix("weight")
            tensors |= {base + suffix: value for suffix, value in made.items()}
        else:
            tensors[name] = tensor
    routers = [match.group(1) for name in plain if (match := ROUTER.match(name))]
    left = ["lm_head", *routers]
    return tensors, {**form.config, form.skipped: left}


# -- what each format stores for one weight -------------------------------------------------


def _fp8(random: _Random, rows: int, columns: int) -> Tensors:
    return {"weight": random.values(rows, columns, dtype="float8_e4m3fn")}


def _fp8_per_tensor(random: _Random, rows: int, columns: int) -> Tensors:
    scales = {"weight_scale": random.values(), "input_scale": random.values()}
    return _fp8(random, rows, columns) | scales


def _fp8_per_tensor_dynamic(random: _Random, rows: int, columns: int) -> Tensors:
    return _fp8(random, rows, columns) | {"weight_scale": random.values()}


def _fp8_per_block(random: _Random, rows: int, columns: int) -> Tensors:
    scales = random.values(-(-rows // GROUP), -(-columns // GROUP))
    return _fp8(random, rows, columns) | {"weight_scale_inv": scales}


def _fp8_per_channel(random: _Random, rows: int, columns: int) -> Tensors:
    return _fp8(random, rows, columns) | {"weight_scale": random.values(rows, 1)}


def _int8_per_channel(random: _Random, rows: int, columns: int) -> Tensors:
    return {
        "weight": random.bits(rows, columns, dtype="int8"),
        "weight_scale": random.values(rows, 1),
    }


def _packed(bits: int, *, zeros: bool = False, order: bool = False) -> Make:
    """Integers of compressed-tensors, packed along the input."""

    def make(random: _Random, rows: int, columns: int) -> Tensors:
        import torch

        made = {
            "weight_packed": random.bits(rows, columns * bits // 32),
            "weight_scale": random.values(rows, columns // GROUP, dtype="bfloat16"),
            "weight_shape": torch.tensor([rows, columns], dtype=torch.int64),
        }
        if zeros:
            made["weight_zero_point"] = random.bits(rows * bits // 32, columns // GROUP)
        if order:
            made["weight_g_idx"] = (random.permutation(columns) // GROUP).to(torch.int32)
        return made

    return make


def _nvfp4_packed(random: _Random, rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": random.bits(rows, columns // 2, dtype="uint8"),
        "weight_scale": random.values(rows, columns // 16, dtype="float8_e4m3fn"),
        "weight_global_scale": random.values(1),
        "input_global_scale": random.values(1),
    }


def _nvfp4(random: _Random, rows: int, columns: int) -> Tensors:
    return {
        "weight": random.bits(rows, columns // 2, dtype="uint8"),
        "weight_scale": random.values(rows, columns // 16, dtype="float8_e4m3fn"),
        "weight_scale_2": random.values(),
        "input_scale": random.values(),
    }


def _mxfp4_packed(random: _Random, rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": random.bits(rows, columns // 2, dtype="uint8"),
        "weight_scale": random.bits(rows, columns // 32, dtype="uint8"),
    }


def _mxfp4_experts(random: _Random, name: str, experts: int, columns: int, rows: int) -> Tensors:
    """Blocks of 32 elements in 16 bytes, and a byte of scale for each."""
    return {
        f"{name}_blocks": random.bits(experts, rows, columns // 32, 16, dtype="uint8"),
        f"{name}_scales": random.bits(experts, rows, columns // 32, dtype="uint8"),
    }


def _mxfp8(random: _Random, rows: int, columns: int) -> Tensors:
    scales = random.bits(rows, columns // 32, dtype="uint8")
    return _fp8(random, rows, columns) | {"weight_scale": scales}


def _awq(random: _Random, rows: int, columns: int) -> Tensors:
    return {
        "qweight": random.bits(columns, rows // 8),
        "qzeros": random.bits(columns // GROUP, rows // 8),
        "scales": random.values(columns // GROUP, rows, dtype="float16"),
    }


def _gptq(bits: int, *, order: bool) -> Make:
    def make(random: _Random, rows: int, columns: int) -> Tensors:
        import torch

        inputs = random.permutation(columns) if order else torch.arange(columns)
        return {
            "qweight": random.bits(columns * bits // 32, rows),
            "qzeros": random.bits(columns // GROUP, rows * bits // 32),
            "scales": random.values(columns // GROUP, rows, dtype="float16"),
            "g_idx": (inputs // GROUP).to(torch.int32),
        }

    return make


# -- their configurations -------------------------------------------------------------------


def _compressed(form: str, weights: Mapping[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def _weights(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **more,
    }


_PER_TOKEN = {"symmetric": True, "dynamic": True, "strategy": "token"}
_GROUPED = {"strategy": "group", "group_size": GROUP}
_HALF = {"dtype": "float16"}


def _gptq_config(bits: int, *, order: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": order,
        "sym": True,
        "lm_head": False,
    }


FORMATS: dict[str, Format] = {
    "fp8-per-tensor": Format(
        _fp8_per_tensor, {"quant_method": "fp8", "activation_scheme": "static"}, "ignored_layers"
    ),
    "fp8-per-tensor-dynamic": Format(
        _fp8_per_tensor_dynamic,
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "ignored_layers",
    ),
    "fp8-per-block": Format(
        _fp8_per_block,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [GROUP, GROUP],
        },
    ),
    "ct-fp8-per-channel": Format(
        _fp8_per_channel,
        _compressed(
            "float-quantized",
            _weights("float", 8, "channel"),
            {"num_bits": 8, "type": "float", **_PER_TOKEN},
        ),
        "ignore",
    ),
    "ct-int8": Format(
        _int8_per_channel,
        _compressed(
            "int-quantized",
            _weights("int", 8, "channel"),
            {"num_bits": 8, "type": "int", **_PER_TOKEN},
        ),
        "ignore",
    ),
    "ct-int4": Format(
        _packed(4),
        _compressed("pack-quantized", _weights("int", 4, "group", group_size=GROUP)),
        "ignore",
    ),
    "ct-int4-zeros": Format(
        _packed(4, zeros=True),
        _compressed(
            "pack-quantized", _weights("int", 4, "group", group_size=GROUP, symmetric=False)
        ),
        "ignore",
    ),
    "ct-int4-order": Format(
        _packed(4, order=True),
        _compressed(
            "pack-quantized", _weights("int", 4, "group", group_size=GROUP, actorder="group")
        ),
        "ignore",
    ),
    "ct-int8-packed": Format(
        _packed(8),
        _compressed("pack-quantized", _weights("int", 8, "group", group_size=GROUP)),
        "ignore",
    ),
    "ct-nvfp4": Format(
        _nvfp4_packed,
        _compressed(
            "nvfp4-pack-quantized",
            _weights("float", 4, "tensor_group", group_size=16),
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "symmetric": True,
                "dynamic": "local",
            },
        ),
        "ignore",
    ),
    "ct-mxfp4": Format(
        _mxfp4_packed,
        _compressed("mxfp4-pack-quantized", _weights("float", 4, "group", group_size=32)),
        "ignore",
    ),
    "mxfp4": Format(None, {"quant_method": "mxfp4"}, fused=True),
    "fbgemm-fp8": Format(
        _fp8_per_channel, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    ),
    "auto-round": Format(
        _gptq(4, order=False),
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
        },
        engine=_HALF,
    ),
    "modelopt-nvfp4": Format(
        _nvfp4,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        "ignore",
    ),
    "modelopt-fp8": Format(
        _fp8_per_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}, "ignore"
    ),
    "modelopt-mxfp8": Format(_mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "ignore"),
    "awq": Format(
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
        engine=_HALF,
    ),
    "gptq-4bit": Format(_gptq(4, order=False), _gptq_config(4, order=False), engine=_HALF),
    "gptq-4bit-desc-act": Format(_gptq(4, order=True), _gptq_config(4, order=True), engine=_HALF),
    "gptq-8bit": Format(_gptq(8, order=False), _gptq_config(8, order=False), engine=_HALF),
}
"""Name of a format -> the format."""
