"""The engine's own key: the model's content instead of its path, and no addresses.

Without these a bundle that fits is in place and the engine does not look there: its directories
are named by digests of the model's path and of variables such as ``VLLM_PLUGINS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.engine.compile_start import compile_cache_is_on
from fastload_common.engine.patch import Patch
from fastload_vllm import compat
from fastload_vllm.compile_factors import (
    is_recording,
    recorded,
    without_model_noise,
    without_variable_noise,
)

__all__ = ["PATCHES"]


def _factors(original: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
    factors = original(config, *args, **kwargs)
    if is_recording() or compile_cache_is_on():
        if isinstance(config, compat.MODEL_CONFIG.get()):
            factors = without_model_noise(config, factors)
        recorded(config, factors)
    return factors


def _variables(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    factors = original(*args, **kwargs)
    return without_variable_noise(factors) if compile_cache_is_on() else factors


PATCHES = (
    Patch(
        name="compile-key-model",
        target=compat.HASH_FACTORS,
        reason="The model's path is part of the engine's key, so the same model elsewhere, or a "
        "different one at the same path, is not told apart by what it is.",
        ends="The engine's key has the model's content.",
        wrapper=_factors,
    ),
    Patch(
        name="compile-key-variables",
        target=compat.COMPILE_VARIABLES,
        reason="Ports, addresses and the list of plugins are part of the engine's key, so two "
        "pods never share one.",
        ends="The engine leaves them out.",
        wrapper=_variables,
    ),
)
