"""Where SGLang keeps what it compiles, and when that is complete.

SGLang's own keys hold neither the model nor the rank: a key that does must stand above them. All
of it is code that is run when it is loaded.
"""

from __future__ import annotations

from fastload_common.engine.cache_roots import CacheRoot, CompletePoint
from fastload_sglang import compat

__all__ = ["BASE", "COMPLETE", "NOT_KEPT", "ROOTS", "TACTICS_VARIABLE"]

TACTICS_VARIABLE = "_FASTLOAD_FLASHINFER_TACTICS"
"""Directory of FlashInfer's choices; not a setting, and the engine has none for it."""

BASE = CacheRoot(
    name="sglang",
    variables=("SGLANG_CACHE_DIR",),
    default="~/.cache/sglang",
    note="The engine's cache directory, below which most of the others are.",
)

ROOTS: tuple[CacheRoot, ...] = (
    CacheRoot(
        "inductor",
        ("TORCHINDUCTOR_CACHE_DIR",),
        "{engine}/inductor",
        note="Set when the engine is imported, unless it was set.",
    ),
    CacheRoot("triton", ("TRITON_CACHE_DIR",), "{engine}/triton", note="As inductor."),
    CacheRoot("cuda-driver", ("CUDA_CACHE_PATH",), "{engine}/nv"),
    CacheRoot("tilelang", ("TILELANG_CACHE_DIR",), "{engine}/tilelang"),
    CacheRoot(
        "flashinfer",
        ("FLASHINFER_WORKSPACE_BASE",),
        "{engine}",
        below=(".cache/flashinfer",),
        note="Read when flashinfer is imported.",
    ),
    CacheRoot(
        "flashinfer-autotune",
        (TACTICS_VARIABLE,),
        "{engine}/flashinfer/autotune",
        note="One file for each rank. The variable is ours: a patch looks at it.",
    ),
    CacheRoot(
        "torch-compile",
        (),
        "{engine}/torch_compile_cache",
        note="Prefill in pieces, which releases since 0.5.22 no longer offer; not moved, not kept.",
    ),
    CacheRoot("deep-gemm", ("SGLANG_DG_CACHE_DIR",), "{engine}/deep_gemm"),
    CacheRoot(
        "jit-kernels",
        ("SGLANG_JIT_CACHE_DIR",),
        "~/.cache/sglang/jit",
        note="Does not move with the engine's cache directory. Content-addressed, never changed.",
    ),
    CacheRoot("cute-aot", ("SGLANG_CUTE_AOT_CACHE_DIR",), "{engine}/cute_aot"),
    CacheRoot("tvm-ffi", ("TVM_FFI_CACHE_DIR",), "~/.cache/tvm-ffi"),
    CacheRoot("torch-extensions", ("TORCH_EXTENSIONS_DIR",), "~/.cache/torch_extensions"),
)
"""Each may be absent: what a run does not use is not there."""

NOT_KEPT: tuple[CacheRoot, ...] = (
    CacheRoot(
        "peer-access",
        (),
        "{engine}",
        below=("gpu_p2p_access_cache_for_*.json",),
        portable=False,
        note="Of one host's devices.",
    ),
    CacheRoot("rust-extensions", (), "{engine}/rust_extensions", portable=False),
    CacheRoot(
        "model-streamer",
        (),
        "{engine}/model_streamer",
        portable=False,
        note="Models' small files, or links to ours.",
    ),
    CacheRoot("locks", (), "{engine}/locks", portable=False),
)
"""What stands below the same directories and must not be given to others."""

COMPLETE: tuple[CompletePoint, ...] = (
    CompletePoint(
        compat.CAPTURED,
        "Weights are loaded, graphs captured, kernels tuned. All there is for an engine without "
        "an HTTP server.",
    ),
    CompletePoint(
        compat.WARM,
        "The server has answered its own warm-up request: functions that are compiled when they "
        "are first called are there too.",
    ),
)
"""In each scheduler process; the later one counts where both are reached."""
