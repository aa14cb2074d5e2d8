"""Tensors that are given to a loader can do what tensors can, whatever it asks before it slices.

Small programs in the manner of the engines' loaders, once with the tensors themselves and once in
a load from the rig. The loaders of all architectures are the sweep's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch

from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.testing.checkpoints import encode_file
from fastload_common.testing.rig import Rig
from tests.cases.harness import BUCKET, settings, use

Tensors = dict[str, torch.Tensor]
Program = Callable[[Tensors], Tensors]


def made(*sizes: int, dtype: torch.dtype = torch.float32, first: int = 1) -> torch.Tensor:
    stop = first + math.prod(sizes)
    return torch.arange(first, stop, dtype=torch.float32).reshape(sizes).to(dtype)


CHECKPOINT: Tensors = {
    "qweight": made(64, 24, dtype=torch.int32),
    "qzeros": made(4, 24, dtype=torch.int32),
    "scales": made(4, 192),
    "qkv_proj": made(96, 32),
    "gate_up_proj": made(128, 32),
    "A_log": made(8) / 8,
    "dt_bias": made(8),
    "conv1d": made(48, 1, 4),
    "experts": made(4, 64, 32),
    "input_scale": torch.tensor(0.5),
    "k_scale": made(1),
}


def awq(w: Tensors) -> Tensors:
    """AWQ's layers are stored the other way round, and packed."""
    qweight, scales = w["qweight"].T, w["scales"].t()
    assert (qweight.dtype, qweight.numel(), qweight.dim()) == (torch.int32, 64 * 24, 2)
    assert not qweight.is_contiguous()
    return {
        "qweight": qweight.narrow(0, 12, 12).contiguous(),
        "qzeros": w["qzeros"].T[12:],
        "scales": scales.chunk(2)[1].clone(memory_format=torch.contiguous_format),
    }


def packed_qkv(w: Tensors) -> Tensors:
    """Phi-3, and others with one tensor for q, k and v: split by sizes, then a rank's part."""
    q, k, v = torch.split(w["qkv_proj"], [48, 24, 24], dim=0)
    gate, up = w["gate_up_proj"].view(2, -1, 32).unbind(0)
    parts = [part.narrow(0, len(part) // 2, len(part) // 2) for part in (q, k, v)]
    return {
        "qkv": torch.cat(parts),
        "gate_up": torch.cat([gate[:32], up[:32]]),
        "heads": w["qkv_proj"].view(12, 8, 32).permute(1, 0, 2).reshape(96, 32),
    }


def mamba(w: Tensors) -> Tensors:
    """Constants of the state space are transformed after their slice is taken."""
    x, b, c = torch.split(w["conv1d"], [32, 8, 8], dim=0)
    return {
        "A": -torch.exp(w["A_log"][4:].float()),
        "dt_bias": w["dt_bias"].data[4:].to(torch.bfloat16),
        "conv1d": torch.cat([x[16:], b, c], dim=0).squeeze(1),
        "conv_view": w["conv1d"].view(w["conv1d"].size(0), w["conv1d"].size(2)),
    }


def experts(w: Tensors) -> Tensors:
    stacked = w["experts"]
    assert stacked.shape[0] == len(stacked) == 4
    gate, up = stacked.chunk(2, dim=1)
    return {
        "w13": torch.stack([torch.cat([g, u]) for g, u in zip(gate[2:], up[2:], strict=True)]),
        "transposed": stacked.transpose(1, 2)[..., 32:].contiguous(),
        "one": stacked[3].flatten(),
        "picked": stacked[torch.tensor([3, 0])],
        "masked": stacked.masked_fill(stacked > 100, 0.0),
    }


def scalars(w: Tensors) -> Tensors:
    """Scales have no shape, or one element; some loaders ask for the value."""
    scale, other = w["input_scale"], w["k_scale"]
    assert scale.shape == ()
    assert scale.ndim == 0
    filled = torch.full((4,), scale.item())
    if other == 1.0:
        filled += float(other)
    return {
        "filled": filled,
        "reshaped": scale.reshape(1),
        "most": torch.max(scale, other),
        "repeated": scale.unsqueeze(0).repeat(3),
    }


def facts(w: Tensors) -> Tensors:
    """What is asked of a tensor before anything is done with it."""
    weight = w["qkv_proj"]
    assert isinstance(weight, torch.Tensor)
    assert weight.device.type == "cpu"
    assert not weight.is_meta
    assert not weight.requires_grad
    assert weight.stride() == (32, 1)
    assert weight.storage_offset() == 0
    assert weight.element_size() == 4
    assert weight.nbytes == 96 * 32 * 4
    assert weight.is_floating_point()
    assert weight.layout is torch.strided
    assert weight.detach().shape == weight.data.shape == torch.Size([96, 32])
    return {
        "int": weight[:2].int(),
        "half": weight.to("cpu", torch.float16),
        "bits": weight.view(torch.int32)[5],
        "bytes": weight[3].view(torch.uint8),
        "double": weight[0].double() * 2 + 1,
        "empty": torch.zeros_like(weight),
        "list": torch.tensor(weight[0].tolist()),
        "numpy": torch.from_numpy(weight[1].numpy().copy()),
    }


PROGRAMS = (awq, packed_qkv, mamba, experts, scalars, facts)


def run(program: Program, weights: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    """What the program makes, copied into parameters as a loader copies it."""
    results = program(dict(weights))
    targets = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in results.items()}
    for name, value in results.items():
        targets[name].copy_(value)
    return targets


@pytest.mark.parametrize("trace", ["lazy", "eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_t09_tensors_can_do_what_loaders_ask(
    monkeypatch: pytest.MonkeyPatch, program: Program, trace: str
) -> None:
    expected = run(program, CHECKPOINT.items())
    arrays = {name: value.numpy() for name, value in CHECKPOINT.items()}
    with Rig() as rig:
        use(rig, monkeypatch)
        rig.put(BUCKET, "t09/model.safetensors", encode_file(arrays))
        source = WeightSource(f"s3://{BUCKET}/t09")
        with LoadSession([source], settings(trace=trace)) as session:
            found = session.load(None, lambda weights: run(program, weights))
    # No program had to be run a second time with other tensors.
    assert session.report.eager_reason == (None if trace == "lazy" else "FASTLOAD_TRACE=eager")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
