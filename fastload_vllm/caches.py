"""Where vLLM, and the compilers that it uses, keep what they compile.

The names of the engine's own directories below ``VLLM_CACHE_ROOT`` are digests of its
configuration: see ``patches/compile_key.py``.
"""

from __future__ import annotations

from fastload_common.engine.cache_roots import CacheRoot

__all__ = ["ROOTS"]

ROOTS: tuple[CacheRoot, ...] = (
    CacheRoot(
        "vllm",
        ("VLLM_CACHE_ROOT",),
        "~/.cache/vllm",
        below=("torch_compile_cache", "deep_gemm", "flashinfer_autotune_cache"),
        note="Compiled graphs of torch.compile, and kernels of DeepGEMM. What else stands there "
        "is of one host, or is not compiled.",
    ),
    CacheRoot(
        "inductor",
        ("TORCHINDUCTOR_CACHE_DIR",),
        "/tmp/torchinductor_{user}",
        note="Set anew by the engine for what it compiles ahead of time.",
    ),
    CacheRoot("triton", ("TRITON_CACHE_DIR",), "~/.triton/cache"),
    CacheRoot("cuda-driver", ("CUDA_CACHE_PATH",), "~/.nv/ComputeCache"),
    CacheRoot("tilelang", ("TILELANG_CACHE_DIR",), "~/.tilelang/cache"),
    CacheRoot(
        "flashinfer",
        ("FLASHINFER_WORKSPACE_BASE",),
        "~",
        below=(".cache/flashinfer",),
        note="Read when flashinfer is imported.",
    ),
    CacheRoot("tvm-ffi", ("TVM_FFI_CACHE_DIR",), "~/.cache/tvm-ffi"),
    CacheRoot("torch-extensions", ("TORCH_EXTENSIONS_DIR",), "~/.cache/torch_extensions"),
)
"""Each may be absent: what a run does not use is not there."""
