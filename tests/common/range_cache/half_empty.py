"""How full the machine's own disk is must not decide what a test's cache keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fastload_common.units import GIB

__all__ = ["half_empty"]


def half_empty(statvfs: Callable[[Any], os.statvfs_result]) -> Callable[[Any], os.statvfs_result]:
    """The same question, whose answer for any disk that no test has made is that half is free."""

    def ask(path: Any) -> os.statvfs_result:
        found = statvfs(path)
        if found.f_blocks * found.f_frsize < GIB:
            return found  # made by a test
        row = list(found)
        row[3] = row[4] = found.f_blocks // 2
        return os.statvfs_result(row)

    return ask
