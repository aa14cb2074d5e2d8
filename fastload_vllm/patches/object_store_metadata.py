"""`ModelConfig.maybe_pull_model_tokenizer_for_runai`: pull s3:// metadata ourselves."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn

from fastload_common.config import Settings, load_settings
from fastload_common.errors import ConfigError
from fastload_common.load.metadata import (
    fetch_metadata,
    require_configuration,
    require_tokenizer,
)
from fastload_vllm import compat
from fastload_vllm.asked import LOAD_FORMAT, Asked, asked
from fastload_vllm.patches.patch import Patch

__all__ = ["PATCH"]

_RUNAI_PACKAGE = "runai_model_streamer"


def _pull(
    original: Callable[..., Any], self: Any, model: str, tokenizer: str, *args: Any, **kwargs: Any
) -> Any:
    is_object_uri = compat.IS_OBJECT_URI.get()
    remote = [uri for uri in (model, tokenizer) if is_object_uri(str(uri))]
    if self.model_weights or not remote:
        return original(self, model, tokenizer, *args, **kwargs)
    wish = asked()
    if wish is not None and wish.fastload:
        _fetch(self, model, tokenizer, load_settings(wish.extra_config))
        return None
    if importlib.util.find_spec(_RUNAI_PACKAGE) is None:
        if wish is not None:
            _explain(remote[0], wish)
        # Built outside of EngineArgs: the load format is not known yet, and only ours can work.
        _fetch(self, model, tokenizer, load_settings())
        return None
    return original(self, model, tokenizer, *args, **kwargs)


def _fetch(config: Any, model: str, tokenizer: str, settings: Settings) -> None:
    """Set what the original sets: `model_weights` is the URI, the others are directories."""
    is_object_uri = compat.IS_OBJECT_URI.get()
    _refuse_other_stores([uri for uri in (model, tokenizer) if is_object_uri(uri)])
    wants_tokenizer = not config.skip_tokenizer_init
    if is_object_uri(model):
        directory = fetch_metadata(model, settings)
        if not config.hf_config_path:
            require_configuration(model, directory)
        if tokenizer == model:
            if wants_tokenizer:
                require_tokenizer(model, directory)
            config.tokenizer = str(directory)
        config.model = str(directory)
        config.model_weights = model
    if is_object_uri(tokenizer) and tokenizer != model:
        directory = fetch_metadata(tokenizer, settings, weights=False)
        if wants_tokenizer:
            require_tokenizer(tokenizer, directory)
        config.tokenizer = str(directory)


def _refuse_other_stores(uris: list[str]) -> None:
    for uri in uris:
        if not uri.lower().startswith("s3://"):
            raise ConfigError(
                f"load format {LOAD_FORMAT} reads s3:// and directories, got {uri}",
                hint="copy the model to an S3-compatible store, or use --load-format "
                "runai_streamer for gs:// and az://",
            )


def _explain(uri: str, wish: Asked) -> NoReturn:
    """The original would ask for the Run:ai package; name the flag that works as things are.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{uri} needs a load format that reads object stores, got {wish.load_format}",
        hint=f"add --load-format {LOAD_FORMAT} (installed), or install vllm[runai] for the "
        "Run:ai formats",
    )


PATCH = Patch(
    name="object-store-metadata",
    target=compat.PULL_METADATA,
    reason="vLLM pulls configuration and tokenizer of s3:// models with the Run:ai package, "
    "which fastload does not need.",
    ends="A loader can provide the metadata of its models.",
    wrapper=_pull,
)
