"""Python's garbage collector, while a load makes many records that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["old_objects_at_rest"]


@contextmanager
def old_objects_at_rest() -> Iterator[None]:
    """In this block the collector looks only at objects that are made in it.

    Else each of its full passes looks at everything that the engine and the trace have made, and
    planning 100,000 tensors makes so many records that there are several: more than half of the
    time of the plan. Where somebody has frozen objects already, they stay so: nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
