"""Stand-ins for kernels that the engine has for other machines only.

Without a kernel for a layer the engine does not even make its parameters. For comparing what
is loaded no kernel is needed: where the engine finds none, it is given one that computes
nothing, and whose post-processing says so. What the engine can do itself, it does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LINEAR = "vllm.model_executor.kernels.linear"
_ORACLE = "vllm.model_executor.layers.fused_moe.oracle"

_LINEAR_CHOICES = (
    "choose_mp_linear_kernel",
    "init_fp8_linear_kernel",
    "init_int8_linear_kernel",
    "init_mxfp8_linear_kernel",
    "init_mxfp4_linear_kernel",
    "init_wfp8_a16_linear_kernel",
    "init_nvfp4_linear_kernel",
)

# Module of the choice -> the function, the class of its answer, and the member that stands for
# the plainest way of doing it.
_EXPERT_CHOICES = {
    "unquantized": ("select_unquantized_moe_backend", "UnquantizedMoeBackend", "TRITON"),
    "fp8": ("select_fp8_moe_backend", "Fp8MoeBackend", "TRITON"),
    "int8": ("select_int8_moe_backend", "Int8MoeBackend", "TRITON"),
    "int_wna16": ("select_wna16_moe_backend", "WNA16MoEBackend", "TRITON"),
    "mxfp4": ("select_mxfp4_moe_backend", "Mxfp4MoeBackend", "EMULATION"),
    "mxfp8": ("select_mxfp8_moe_backend", "Fp8MoeBackend", "EMULATION"),
    "nvfp4": ("select_nvfp4_moe_backend", "NvFp4MoeBackend", "EMULATION"),
}


used: set[str] = set()
"""The choices in which a stand-in was taken. Whoever looks at it empties it before."""


class _Nothing:
    """Neither true nor of use: what an absent kernel says to any question."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *arguments: Any, **named: Any) -> None:
        return None


class AbsentKernel:
    """Computes nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def process_weights_after_loading(self, *arguments: Any, **named: Any) -> None:
        """Leave the weights as they are."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    @classmethod
    def is_supported_config(cls, *arguments: Any, **named: Any) -> tuple[bool, None]:
        return True, None


def stand_in() -> None:
    """Put the stand-ins behind the engine's choices, in every module that knows them."""
    linear = importlib.import_module(_LINEAR)
    for name in _LINEAR_CHOICES:
        absent: Any = AbsentKernel if name.startswith("choose") else AbsentKernel()
        _replace(linear, name, absent)
    for module_name, (name, kind, member) in _EXPERT_CHOICES.items():
        module = importlib.import_module(f"{_ORACLE}.{module_name}")
        members = getattr(module, kind)
        backend = getattr(members, member, None) or next(iter(members))
        _replace(module, name, (backend, AbsentKernel))
    _triton()
    _fp8()
    _marlin()
    _experts_without_gate()
    _dense_attention()


def _replace(module: Any, name: str, absent: Any) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def choose(*arguments: Any, **named: Any) -> Any:
        try:
            return original(*arguments, **named)
        except (ValueError, NotImplementedError, RuntimeError, AssertionError, ImportError):
            used.add(name)
            return absent

    _everywhere(name, original, choose)


def _everywhere(name: str, original: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if vars(module).get(name) is original:
            setattr(module, name, new)


def _triton() -> None:
    """A model tells Triton how to allocate memory, where there is a Triton or not."""
    from vllm.triton_utils import triton

    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = lambda allocator: None


def _fp8() -> None:
    """Quantize to fp8 in plain torch; the engine's operation is not in this build."""
    from vllm import _custom_ops

    def scaled_fp8_quant(
        value: Any, scale: Any = None, *_: Any, use_per_token_if_dynamic: bool = False, **__: Any
    ) -> Any:
        used.add("scaled_fp8_quant")
        if scale is None:
            largest = value.float().abs()
            largest = largest.amax(-1, keepdim=True) if use_per_token_if_dynamic else largest.max()
            scale = (largest / torch.finfo(torch.float8_e4m3fn).max).reshape(-1)
            scale = scale.reshape(-1, 1) if use_per_token_if_dynamic else scale
        return (value.float() / scale).to(torch.float8_e4m3fn), scale

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant


def _marlin() -> None:
    """GPTQ asks early whether one kernel of another machine supports the format."""
    marlin = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    importlib.import_module("vllm.model_executor.layers.quantization.auto_gptq")
    _replace(marlin, "verify_marlin_supported", None)


def _experts_without_gate() -> None:
    """The engine runs experts without a gate on GPUs only; it says so when they are made."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    original = FusedMoEConfig.__post_init__

    def check(config: Any) -> None:
        with contextlib.suppress(NotImplementedError):
            original(config)

    FusedMoEConfig.__post_init__ = check


def _dense_attention() -> None:
    """Let models with sparse attention have the backend for dense attention."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    original = kind.get_attn_backend_cls.__func__

    def choose(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        return original(
            cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads
        )

    kind.get_attn_backend_cls = classmethod(choose)


@contextlib.contextmanager
def balancing(wanted: bool) -> Iterator[None]:
    """Let a configuration have redundant experts, which the engine balances on GPUs only."""
    if not wanted:
        yield
        return
    from vllm.platforms import current_platform

    kind = type(current_platform)
    original = kind.is_xpu
    kind.is_xpu = lambda self: True
    try:
        yield
    finally:
        kind.is_xpu = original
