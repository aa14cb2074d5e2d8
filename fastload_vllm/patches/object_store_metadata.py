"""`ModelConfig.maybe_pull_model_tokenizer_for_runai`: pull s3:// and oci:// metadata ourselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.config import Settings, load_settings
from fastload_common.engine.object_model import (
    explain_format,
    fetch_model,
    fetch_tokenizer,
    is_registry_uri,
    other_format_works,
    pin_model,
)
from fastload_common.engine.patch import Patch
from fastload_vllm import compat
from fastload_vllm.asked import asked
from fastload_vllm.port import is_object_uri

__all__ = ["PATCH"]


def _pull(
    original: Callable[..., Any], self: Any, model: str, tokenizer: str, *args: Any, **kwargs: Any
) -> Any:
    remote = [uri for uri in (model, tokenizer) if is_object_uri(str(uri))]
    if self.model_weights or not remote:
        return original(self, model, tokenizer, *args, **kwargs)
    wish = asked()
    if wish is not None and wish.fastload:
        _fetch(self, model, tokenizer, load_settings(wish.extra_config))
        return None
    ours = [uri for uri in remote if is_registry_uri(str(uri))]
    if ours or not other_format_works():
        if wish is not None:
            explain_format(compat.ENGINE, [*ours, *remote][0], wish.load_format)
        # Built outside of EngineArgs: the load format is not known yet, and only ours can work.
        _fetch(self, model, tokenizer, load_settings())
        return None
    return original(self, model, tokenizer, *args, **kwargs)


def _fetch(config: Any, model: str, tokenizer: str, settings: Settings) -> None:
    """Set what the original sets: `model_weights` is the URI, the others are directories.

    All processes of the engine read what a tag named here.
    """
    wants_tokenizer = not config.skip_tokenizer_init
    if is_object_uri(model):
        pinned = pin_model(model, settings)
        directory = fetch_model(
            pinned,
            settings,
            configuration=not config.hf_config_path,
            tokenizer=wants_tokenizer and tokenizer == model,
        )
        if tokenizer == model:
            config.tokenizer = str(directory)
        config.model = str(directory)
        config.model_weights = pinned
    if is_object_uri(tokenizer) and tokenizer != model:
        config.tokenizer = str(fetch_tokenizer(tokenizer, settings, required=wants_tokenizer))


PATCH = Patch(
    name="object-store-metadata",
    target=compat.PULL_METADATA,
    reason="vLLM pulls configuration and tokenizer of s3:// models with the Run:ai package, "
    "which fastload does not need.",
    ends="A loader can provide the metadata of its models.",
    wrapper=_pull,
)
