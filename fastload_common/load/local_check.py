"""Look at a model in a directory before an engine starts its processes for it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fastload_common.config import Settings
from fastload_common.errors import ObjectMissingError
from fastload_common.load.open_model import open_checkpoint
from fastload_common.source.registry import open_source

__all__ = ["check_local_model"]


def check_local_model(model: str, settings: Settings) -> None:
    """Find out now what would end the load in every rank later. Hub ids are left alone.

    Args:
        model: as the operator named it: a directory, a hub id, anything.

    Raises:
        ObjectMissingError: it can only be meant as a directory, and there is none.
        CheckpointError: no weights in it, or damaged ones.
    """
    path = Path(model).expanduser()
    if not path.is_dir():
        if model.startswith(("/", "./", "../", "~")) and not path.exists():
            raise ObjectMissingError(
                f"no such directory: {model}",
                hint="name a directory with *.safetensors, or an s3:// URI",
            )
        return
    with contextlib.closing(open_source(str(path), settings)) as source:
        open_checkpoint(source, settings, prefer="auto")
