"""Errors while cleaning up, which must not hide the one that ended the load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastload_common.errors import FastloadError

__all__ = ["kept"]


@contextmanager
def kept(error: BaseException | None) -> Iterator[None]:
    """Clean up in this block: what is raised in it becomes a note of the error, if there is one."""
    try:
        yield
    except Exception as second:
        if error is None:
            raise
        # Not its text, unless it is ours: a foreign one may hold a signed URL.
        text = str(second) if isinstance(second, FastloadError) else ""
        error.add_note(f"while cleaning up: {type(second).__name__} {text}")
