"""Puts files that were fetched whole into the tree, below what layers have made of it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fastload_common.pull.safe_tree import Parts, SafeTree, split_name
from fastload_common.pull.spool import Spool

__all__ = ["place_files"]

_FILE_MODE = 0o644
_DIRECTORY_MODE = 0o755
_COPY_BYTES = 1 << 20


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
