"""`EngineArgs.create_speculative_config`: the same for draft models of their own format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastload_common.engine.patch import Patch
from fastload_vllm import compat
from fastload_vllm.asked import asking

__all__ = ["PATCH"]


def _create(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    load_format, extra_config = self.load_format, self.model_loader_extra_config
    wanted = self.speculative_config
    # The command line may spell the key with dashes; vLLM normalizes it inside the original.
    own = None
    if isinstance(wanted, Mapping):
        own = wanted.get("draft_load_config", wanted.get("draft-load-config"))
    if isinstance(own, Mapping):
        load_format = own.get("load_format", load_format)
        extra_config = own.get("model_loader_extra_config", {})
    elif own is not None:
        load_format, extra_config = own.load_format, own.model_loader_extra_config
    with asking(load_format, extra_config):
        return original(self, *args, **kwargs)


PATCH = Patch(
    name="draft-load-format",
    target=compat.CREATE_SPECULATIVE_CONFIG,
    reason="A draft model's ModelConfig is made here, and may be an s3:// model of its own.",
    ends="ModelConfig knows the load format, or asks the loader for metadata.",
    wrapper=_create,
)
