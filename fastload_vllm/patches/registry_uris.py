"""`is_cloud_storage`: an oci:// model is no hub id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.engine.object_model import is_registry_uri
from fastload_common.engine.patch import Patch
from fastload_vllm import compat

__all__ = ["PATCH"]


def _is_remote(original: Callable[..., Any], model_or_path: Any, *args: Any, **kwargs: Any) -> Any:
    # For every load format: what else could read it will say so, and no hub is asked meanwhile.
    if is_registry_uri(str(model_or_path)):
        return True
    return original(model_or_path, *args, **kwargs)


PATCH = Patch(
    name="registry-uris",
    target=compat.IS_CLOUD_STORAGE,
    reason="vLLM asks a hub for the configuration of what it does not know as an object store, "
    "and an oci:// model is in none.",
    ends="vLLM lets plugins say which URIs they read.",
    wrapper=_is_remote,
)
