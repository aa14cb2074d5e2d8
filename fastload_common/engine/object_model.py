"""Models in an object store, before an engine loads them: their small files as a directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NoReturn

from fastload_common.config import Settings
from fastload_common.engine.names import LOAD_FORMAT, Engine
from fastload_common.errors import ConfigError
from fastload_common.load.metadata import (
    fetch_metadata,
    require_configuration,
    require_tokenizer,
)

__all__ = [
    "explain_format",
    "fetch_model",
    "fetch_tokenizer",
    "other_format_works",
    "refuse_other_stores",
]

_RUNAI_PACKAGE = "runai_model_streamer"


def fetch_model(uri: str, settings: Settings, *, configuration: bool, tokenizer: bool) -> Path:
    """Bring a model's small files to a directory that the engine can read.

    Args:
        uri: the model's root.
        settings: of this process.
        configuration: whether it must say what the model is.
        tokenizer: whether there must be a tokenizer.

    Raises:
        ConfigError: a store that is not read, or no directory can be written.
        ObjectMissingError: what must be there is not.
        CheckpointError, SourceError: the weights are not there or damaged, or the store refuses.
    """
    refuse_other_stores(uri)
    directory = fetch_metadata(uri, settings)
    if configuration:
        require_configuration(uri, directory)
    if tokenizer:
        require_tokenizer(uri, directory)
    return directory


def fetch_tokenizer(uri: str, settings: Settings, *, required: bool = True) -> Path:
    """The same for a root that holds only a tokenizer."""
    refuse_other_stores(uri)
    directory = fetch_metadata(uri, settings, weights=False)
    if required:
        require_tokenizer(uri, directory)
    return directory


def refuse_other_stores(uri: str) -> None:
    """Say early that only S3 is read.

    Raises:
        ConfigError: another scheme.
    """
    if not uri.lower().startswith("s3://"):
        raise ConfigError(
            f"load format {LOAD_FORMAT} reads s3:// and directories, got {uri}",
            hint="copy the model to an S3-compatible store, or use --load-format "
            "runai_streamer for gs:// and az://",
        )


def other_format_works() -> bool:
    """Whether the engine's own load formats for object stores have the package they need."""
    return importlib.util.find_spec(_RUNAI_PACKAGE) is not None


def explain_format(engine: Engine, uri: str, load_format: str) -> NoReturn:
    """The engine would ask for another package; name the flag that works as things are.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"{uri} needs a load format that reads object stores, got {load_format}",
        hint=f"add --load-format {LOAD_FORMAT} (installed), or install {engine.package}[runai] for "
        "the Run:ai formats",
    )
