"""Models in an object store, before an engine loads them: their small files as a directory."""

from __future__ import annotations

import contextlib
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
from fastload_common.source.oci_reference import SCHEME as REGISTRY_SCHEME
from fastload_common.source.oci_reference import is_oci_uri
from fastload_common.source.registry import open_source, pinned_uri

__all__ = [
    "REGISTRY_SCHEME",
    "explain_format",
    "fetch_model",
    "fetch_tokenizer",
    "is_registry_uri",
    "other_format_works",
    "pin_model",
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


def is_registry_uri(uri: str) -> bool:
    """Whether it names an artifact in a registry, which no engine reads by itself."""
    return is_oci_uri(uri)


def pin_model(uri: str, settings: Settings) -> str:
    """The same model, named so that every process reads one state: a tag's digest of this moment.

    Raises:
        ConfigError, SourceError: a registry does not have it, or does not answer.
    """
    if not is_registry_uri(uri):
        return uri
    with contextlib.closing(open_source(uri, settings)) as source:
        return pinned_uri(source)


def refuse_other_stores(uri: str) -> None:
    """Say early that only S3 and registries are read.

    Raises:
        ConfigError: another scheme.
    """
    if not uri.lower().startswith(("s3://", "oci://")):
        raise ConfigError(
            f"load format {LOAD_FORMAT} reads s3://, oci:// and directories, got {uri}",
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
    if is_registry_uri(uri):
        raise ConfigError(
            f"{uri} needs a load format that reads registries, got {load_format}",
            hint=f"add --load-format {LOAD_FORMAT} (installed)",
        )
    raise ConfigError(
        f"{uri} needs a load format that reads object stores, got {load_format}",
        hint=f"add --load-format {LOAD_FORMAT} (installed), or install {engine.package}[runai] for "
        "the Run:ai formats",
    )
