"""Puts files that were fetched whole into the tree, below what layers have made of it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastload_common.errors import ArchiveInvalidError
from fastload_common.pull.safe_tree import Parts, SafeTree, shown, split_name
from fastload_common.pull.spool import Spool

__all__ = ["check_names", "place_files"]

_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755
_COPY_BYTES = 1 << 20


def check_names(names: Iterable[str], longest_step_bytes: int) -> None:
    """Whether all of these can be files of one directory, before any of them is fetched.

    Raises:
        ArchiveUnsafeError: a name leads out of the tree.
        ArchiveInvalidError: two are the same file, or one is a file and another lies below it; or
            a name is too long.
    """
    # With NUL for the slash, what lies below a name comes right after it.
    paths = sorted(b"\0".join(split_name(os.fsencode(name), "an object")) for name in names)
    before = None
    for path in paths:
        if any(len(step) > longest_step_bytes for step in path.split(b"\0")):
            raise ArchiveInvalidError(
                f"the name of {_shown(path)} is too long for this file system, which allows "
                f"{longest_step_bytes} bytes between slashes",
                hint="pull to another file system; in S3 or a directory FASTLOAD_IGNORE_PATTERNS "
                "leaves it out",
            )
        if before is not None and (path == before or path.startswith(before + b"\0")):
            what = (
                "two objects have this name, or names that differ by slashes only"
                if path == before
                else f"it is an object, and {_shown(path)} lies below it"
            )
            raise ArchiveInvalidError(
                f"{_shown(before)} cannot be made: {what}",
                hint="rename one; in S3 or a directory FASTLOAD_IGNORE_PATTERNS leaves one out",
            )
        before = path


def _shown(path: bytes) -> str:
    return shown(path.replace(b"\0", b"/"))


def place_files(files: Sequence[tuple[str, Spool]], tree: Path) -> None:
    """Move each file to its name.

    Args:
        files: name and bytes; the same bytes may have several names.

    Raises:
        ArchiveUnsafeError: a name leads out of the tree.
        ArchiveInvalidError: a name is taken, or cannot be.
    """
    uses = Counter(id(spool) for _, spool in files)
    made: list[Parts] = []
    with SafeTree(tree, made.append) as safe:
        for name, spool in files:
            parts = split_name(os.fsencode(name), "an object")
            descriptor = safe.make_file(parts)
            try:
                uses[id(spool)] -= 1
                if uses[id(spool)]:
                    _copy(spool.path, descriptor)
                    os.fchmod(descriptor, _FILE_MODE)
                    continue
            finally:
                os.close(descriptor)
            spool.give_up_journal()
            os.chmod(spool.path, _FILE_MODE)
            os.replace(spool.path, parts[-1], dst_dir_fd=safe.directory(parts[:-1]))
        for parts in made:
            os.fchmod(safe.directory(parts), _DIRECTORY_MODE)


def _copy(path: Path, descriptor: int) -> None:
    with open(path, "rb") as source, open(descriptor, "wb", closefd=False) as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
