"""`ObjectStorageModel.download_and_get_path`: what fastload has fetched is not fetched again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastload_common.engine.object_model import (
    explain_format,
    is_registry_uri,
    other_format_works,
)
from fastload_common.engine.patch import Patch
from fastload_sglang import compat
from fastload_sglang.metadata_link import fetched, is_linked, unlink

__all__ = ["PATCH"]


def _pull(
    original: Callable[..., Any], cls: Any, model_path: str, *args: Any, **kwargs: Any
) -> Any:
    path = Path(cls.get_path(model_path))
    here = fetched.get()
    # A link of another start, for another load format, is not what is wanted now.
    if is_linked(path) and (here is None or model_path in here.uris):
        return str(path)
    if here is not None and (is_registry_uri(model_path) or not other_format_works()):
        explain_format(compat.ENGINE, model_path, here.load_format)
    unlink(path)
    return original(cls, model_path, *args, **kwargs)


PATCH = Patch(
    name="object-store-metadata",
    target=compat.PULL_METADATA,
    reason="SGLang pulls configuration and tokenizer of s3:// models with the Run:ai package, "
    "which fastload does not need.",
    ends="A loader can provide the metadata of its models.",
    wrapper=_pull,
)
