"""What a child process does with a load; imported by name where it is not forked."""

from __future__ import annotations

from typing import Any

from fastload_common.config import Settings


def load_into_queue(uri: str, settings: Settings, queue: Any) -> None:
    """Load, and say how many bytes came and what they add up to, or what went wrong."""
    import zlib

    import torch

    from tests.cases.harness import load

    # The threads of torch's own operations do not outlive a fork.
    torch.set_num_threads(1)
    try:
        found = load(uri, settings)
        queue.put({name: zlib.crc32(value) for name, value in found.items()})
    except BaseException as error:
        queue.put(f"{type(error).__name__}: {error}")
        raise


def read_into_queue(uri: str, key: str, settings: Settings, queue: Any) -> None:
    """Read one object with all connections at once, and say what its bytes add up to."""
    import zlib

    from tests.cases.reading import ranges

    with ranges(uri, settings) as read:
        queue.put(zlib.crc32(read.read(read.source.stat(key))))
