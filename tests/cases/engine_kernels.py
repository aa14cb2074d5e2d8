"""Quantized layers on a machine whose CPU or GPU has no kernel for them: only their weights count.

Which parameters there are, and how they are filled, does not depend on the kernel that would
multiply with them later.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["WNA16_EXPERTS", "without_kernels"]

WNA16_EXPERTS = (
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_wna16"
)


class _NoKernel:
    """Stands where a kernel would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let the engine build quantized layers without looking for a kernel."""
    from vllm.model_executor.layers.quantization import auto_gptq, fp8, modelopt, mxfp4

    wna16 = importlib.import_module(WNA16_EXPERTS)
    mxfp4_backend = mxfp4.Mxfp4MoeBackend.TRITON
    nvfp4_backend = modelopt.NvFp4MoeBackend.FLASHINFER_CUTLASS
    wna16_backend = next(
        backend for backend in wna16.WNA16MoEBackend if "MARLIN" not in backend.name
    )
    stands_in: dict[Any, dict[str, Any]] = {
        fp8: {"init_fp8_linear_kernel": lambda **kwargs: SimpleNamespace()},
        auto_gptq: {
            "verify_marlin_supported": lambda **kwargs: None,
            "choose_mp_linear_kernel": lambda *args: _NoKernel,
        },
        mxfp4: {"select_mxfp4_moe_backend": lambda *args: (mxfp4_backend, _NoKernel)},
        wna16: {"select_wna16_moe_backend": lambda **kwargs: (wna16_backend, _NoKernel)},
        modelopt: {
            "select_nvfp4_moe_backend": lambda **kwargs: (nvfp4_backend, _NoKernel),
            "is_global_sf_supported_for_nvfp4_backend": lambda backend: True,
        },
    }
    with ExitStack() as stack:
        for module, names in stands_in.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        yield
