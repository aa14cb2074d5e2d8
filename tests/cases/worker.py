"""What a child process does with a load; imported by name where it is not forked."""

from __future__ import annotations

from typing import Any

from fastload_common.config import Settings


def load_into_queue(uri: str, settings: Settings, queue: Any) -> None:
    """Load, and say how many bytes came and what they add up to, or what went wrong."""
    import zlib

    from tests.cases.harness import load

    try:
        found = load(uri, settings)
        queue.put({name: zlib.crc32(value) for name, value in found.items()})
    except BaseException as error:
        queue.put(f"{type(error).__name__}: {error}")
        raise
