"""`EngineArgs.create_model_config`: remember the load format while ModelConfig is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_vllm import compat
from fastload_vllm.asked import asking
from fastload_vllm.patches.patch import Patch

__all__ = ["PATCH"]


def _create(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with asking(self.load_format, self.model_loader_extra_config):
        return original(self, *args, **kwargs)


PATCH = Patch(
    name="model-load-format",
    target=compat.CREATE_MODEL_CONFIG,
    reason="ModelConfig pulls the metadata of s3:// models but is not told the load format, so "
    "it could not leave the Run:ai formats as they are.",
    ends="ModelConfig knows the load format, or asks the loader for metadata.",
    wrapper=_create,
)
