"""`VllmConfig.try_verify_and_update_config`: let load format fastload have object-store models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.engine.patch import Patch
from fastload_vllm import compat

__all__ = ["PATCH"]


def _verify(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    model_config = self.model_config
    if self.load_config.load_format != LOAD_FORMAT or not getattr(
        model_config, "model_weights", ""
    ):
        return original(self, *args, **kwargs)
    # The method does more than the check, so it must run; without a URI the check finds
    # nothing to refuse. No other part of it reads the field.
    uri, model_config.model_weights = model_config.model_weights, ""
    try:
        return original(self, *args, **kwargs)
    finally:
        model_config.model_weights = uri


PATCH = Patch(
    name="object-store-format-check",
    target=compat.VERIFY_CONFIG,
    reason="For object-store models vLLM refuses every load format but the Run:ai ones and "
    "modelexpress, also those that a plugin registered.",
    ends="The check accepts registered load formats.",
    wrapper=_verify,
)
