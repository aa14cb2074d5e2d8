"""`EngineArgs.create_model_config`: remember the load format while ModelConfig is made.

A model in a directory is looked at here, as one in S3 is when its metadata is pulled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.config import load_settings
from fastload_common.engine.patch import Patch
from fastload_common.load.local_check import check_local_model
from fastload_vllm import compat
from fastload_vllm.asked import asked, asking

__all__ = ["PATCH"]


def _create(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with asking(self.load_format, self.model_loader_extra_config):
        wish = asked()
        if wish is not None and wish.fastload:
            # An error here is one line; in a worker it is three stacks of the engine.
            check_local_model(str(self.model), load_settings(wish.extra_config))
        return original(self, *args, **kwargs)


PATCH = Patch(
    name="model-load-format",
    target=compat.CREATE_MODEL_CONFIG,
    reason="ModelConfig pulls the metadata of s3:// models but is not told the load format, so "
    "it could not leave the Run:ai formats as they are.",
    ends="ModelConfig knows the load format, or asks the loader for metadata.",
    wrapper=_create,
)
