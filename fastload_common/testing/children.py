"""What tests run in other processes: importable there, unlike a test module."""

from __future__ import annotations

from typing import Any

from fastload_common.source.base import ObjectSource

__all__ = ["read_into_queue"]


def read_into_queue(source: ObjectSource, key: str, queue: Any) -> None:
    """Read the whole object through a source that came from another process."""
    try:
        queue.put(source.read(source.stat(key)))
    finally:
        source.close()
