"""Cases of single linear layers, called in the worker."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases.engine_kernels import without_kernels
from tests.cases.engine_layers import Layers, Weights, compare_layers, numbered
from tests.cases.engine_ranks import Layout, rank_of


def qkv_heads(heads: int, kv_heads: int, tensor: int, head_size: int = 4) -> list[dict[str, Any]]:
    """Every rank's share of q, k, v and their biases; q in one file, k and v in the other."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    hidden = 8
    sizes = {"q": heads * head_size, "k": kv_heads * head_size, "v": kv_heads * head_size}
    files: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}}
    first = 0
    for shard, rows in sizes.items():
        file = files["a" if shard == "q" else "b"]
        file[f"qkv.weight.{shard}"] = numbered(rows, hidden, first=first)
        file[f"qkv.bias.{shard}"] = numbered(rows, first=first + rows * hidden)
        first += rows * (hidden + 1)

    def build() -> Layers:
        return Layers(
            qkv=QKVParallelLinear(
                hidden, head_size, heads, kv_heads, bias=True, params_dtype=torch.float32
            )
        )

    found = []
    for rank in range(tensor):
        with rank_of(Layout(tensor=tensor), rank):
            row = compare_layers(build, files)
            layer = build()
            layer.load_weights(item for file in files.values() for item in file.items())
            kv_rows = layer.get_parameter("qkv.weight")[-2 * head_size :]
            found.append(row | {"kv": kv_rows.flatten().tolist()})
    return found


def fp8_block(kind: str, n: int, k: int, tensor: int) -> list[dict[str, Any]]:
    """A layer with an 8-bit weight and a scale for each block of 128 x 128, on every rank."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(True, "dynamic", weight_block_size=[128, 128])

    def make(name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(linear, name)(*args, bias=False, quant_config=config, **kwargs)

    makers = {
        "column": lambda: make("ColumnParallelLinear", k, n),
        "row": lambda: make("RowParallelLinear", k, n),
        "gate_up": lambda: make("MergedColumnParallelLinear", k, [n, n]),
        "qkv": lambda: make("QKVParallelLinear", k, 64, n // 64, n // 64),
    }
    shards = {"gate_up": ["0", "1"], "qkv": ["q", "k", "v"]}.get(kind, [""])
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(n + k)
    for shard in shards:
        end = f".{shard}" if shard else ""
        raw = torch.randint(0, 120, (n, k), dtype=torch.uint8, generator=generator)
        tensors["layer.weight" + end] = raw.view(torch.float8_e4m3fn)
        tensors["layer.weight_scale_inv" + end] = numbered(
            -(-n // 128), -(-k // 128), first=100_000 * len(tensors)
        )
    found = []
    for rank in range(tensor):
        with rank_of(Layout(tensor=tensor), rank), without_kernels():
            try:
                makers[kind]()
            except Exception as error:
                found.append({"not_built": f"{type(error).__name__}: {error}"})
                continue
            found.append(compare_layers(lambda: Layers(layer=makers[kind]()), {"a": tensors}))
    return found


def packed(
    method: str, kind: str, k: int, n: int, tensor: int, group: int = 128
) -> list[dict[str, Any]]:
    """A 4-bit layer of GPTQ (packed along the input) or AWQ (along the output), on every rank."""
    from vllm.model_executor.layers import linear

    groups = k // (k if group == -1 else group)
    shards = {"gate_up": ["0", "1"], "qkv": ["q", "k", "v"]}.get(kind, [""])
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        end = f".{shard}" if shard else ""
        qweight = (k // 8, n) if method == "gptq" else (k, n // 8)
        for name, sizes, dtype in (
            ("qweight", qweight, torch.int32),
            ("qzeros", (groups, n // 8), torch.int32),
            ("scales", (groups, n), torch.float32),
        ):
            value = numbered(*sizes, first=1_000_000 * len(tensors))
            tensors[f"layer.{name}{end}"] = value.to(dtype)

    def make() -> Any:
        config = packed_config(method, group)
        more = {"bias": False, "quant_config": config, "params_dtype": torch.float32}
        if kind == "row":
            return linear.RowParallelLinear(k, n, **more)
        if kind == "gate_up":
            return linear.MergedColumnParallelLinear(k, [n, n], **more)
        if kind == "qkv":
            return linear.QKVParallelLinear(k, 64, n // 64, n // 64, **more)
        return linear.ColumnParallelLinear(k, n, **more)

    found = []
    for rank in range(tensor):
        with rank_of(Layout(tensor=tensor), rank), without_kernels():
            try:
                make()
            except Exception as error:
                found.append({"not_built": f"{type(error).__name__}: {error}"})
                continue
            layer = make()
            shapes = {name: list(value.shape) for name, value in layer.named_parameters()}
            row = compare_layers(lambda: Layers(layer=make()), {"a": tensors})
            found.append(row | {"shapes": shapes})
    return found


def packed_config(method: str, group: int, *, desc_act: bool = False) -> Any:
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq

    if method == "gptq":
        return auto_gptq.AutoGPTQConfig(4, group, desc_act, True, False, {}, {})

    class Awq(auto_awq.AutoAWQConfig):  # type: ignore[misc]
        """Its plain method: what is chosen by the device has the same parameters."""

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            return auto_awq.AutoAWQLinearMethod(self)

    return Awq(4, group, True, False, [], {})


def gptq_config_refusal(group: int, desc_act: bool) -> str | None:
    """What the engine says to a GPTQ configuration; None where it takes it."""
    try:
        packed_config("gptq", group, desc_act=desc_act)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def ignored_tensor() -> dict[str, Any]:
    """A model that skips what it has no parameter for, as the engine's do with ``g_idx``."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    class Skipping(Layers):
        def load_weights(self, weights: Weights) -> None:
            known = dict(self.named_parameters())
            super().load_weights(item for item in weights if item[0] in known)

    def build() -> Skipping:
        return Skipping(layer=ReplicatedLinear(8, 8, bias=False, params_dtype=torch.float32))

    g_idx = torch.arange(4096, dtype=torch.int32)
    with rank_of(Layout(), 0):
        return compare_layers(build, {"a": {"layer.g_idx": g_idx, "layer.weight": numbered(8, 8)}})
