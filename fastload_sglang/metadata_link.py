"""Where SGLang's processes look for the small files of an object-store model: a link to ours.

SGLang computes a path from the URI in each of its processes, also in those that call no plugin.
fastload's directories are named by their content and shared by engines, so that path becomes a
symbolic link. What Run:ai's loader left there is put aside, and back when that is used again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from fastload_common.errors import ConfigError

__all__ = ["Fetched", "fetched", "is_linked", "link", "unlink"]

_ASIDE = ".runai"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the process that prepares models has linked, and for which load format it works."""

    uris: frozenset[str]
    load_format: str


fetched: ContextVar[Fetched | None] = ContextVar("fastload_sglang_fetched", default=None)
"""None in all other processes."""


def link(path: Path, directory: Path) -> None:
    """Make `path` a link to `directory`, at once.

    Raises:
        ConfigError: it cannot be written.
    """
    aside = path.with_name(path.name + _ASIDE)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        draft.unlink(missing_ok=True)
        draft.symlink_to(directory, target_is_directory=True)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"SGLang's directory for object-store models cannot be written: {error}",
            hint="set SGLANG_CACHE_DIR to a writable directory, e.g. an emptyDir volume",
        ) from None


def is_linked(path: Path) -> bool:
    """Whether the link is there and leads somewhere."""
    return path.is_symlink() and path.is_dir()


def unlink(path: Path) -> None:
    """Make way for Run:ai's own directory."""
    if not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.with_name(path.name + _ASIDE).rename(path)
