"""Where artifacts are unpacked on this node: a directory that only this user can write."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastload_common.compile_cache.stores.directory import unsafe_reason
from fastload_common.config import Settings
from fastload_common.errors import ConfigError, PullError
from fastload_common.load.cache_root import cache_roots, private_directory, temporary_root

__all__ = ["explained", "unpacked_root"]

logger = logging.getLogger(__name__)


def unpacked_root(settings: Settings, environ: Mapping[str, str] | None = None) -> Path:
    """The directory of all unpacked artifacts, which only this user can write; made if need be.

    Where ``cache_dir`` is set, it is there or nowhere: a model must not fill another disk. Who can
    write above it is then the operator's business, and a warning.

    Raises:
        ConfigError: it cannot be made, or others could put their files there.
    """
    reasons: list[str] = []
    for root in cache_roots(settings, environ):
        try:
            if root == temporary_root(environ):
                private_directory(root)
            directory = root / "unpacked"
            private_directory(directory)
            reason = unsafe_reason(directory)
            if reason is not None and settings.cache_dir is not None:
                # An emptyDir of Kubernetes is such a directory, and nobody else is in its pod.
                logger.warning("fastload: who may do this decides what is loaded: %s", reason)
                reason = None
            if reason is None:
                return directory.resolve()
        except OSError as error:
            reason = str(error)
        reasons.append(reason)
        if settings.cache_dir is not None:
            break
    raise ConfigError(
        f"no directory to unpack a model in: {'; '.join(reasons)}",
        hint="set FASTLOAD_CACHE_DIR to a directory that only this user can write, on a disk with "
        "room for the model",
    )


@contextlib.contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn what the file system says into errors of ours."""
    try:
        yield
    except OSError as error:
        hint = "set FASTLOAD_CACHE_DIR to a directory of this user, on a disk with locks"
        if error.errno == errno.ENAMETOOLONG:
            hint = "the names in the artifact are too long below this one: name a shorter "
            hint += "FASTLOAD_CACHE_DIR, or have the artifact packed otherwise"
        raise PullError(f"could not unpack in {directory}: {error}", hint=hint) from error
