"""What placing needs of a device's runtime: copies in order on one stream, marks, page-locking.

`torch_device` does it with torch; `fastload_common.testing.fake_device` records it for tests.

Who calls, and in which order:

1. `Device.register` for host memory, from any thread, inside `Device.current`;
2. `Device.begin` before the first copy of a run, from the loading thread, which also calls
   `memory`, `copy`, `copy_rows`, `spread` and `mark`. What these ask for is done later, in the
   order in which it was asked for;
3. `Mark.wait` from any thread, inside `Device.current`: what was asked for before the mark is done;
4. `Device.finish` at the end of a run; `Device.unregister` when nothing reads the memory any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

__all__ = ["Device", "Mark", "PinRefusedError"]


class PinRefusedError(Exception):
    """Memory cannot be page-locked here; copies work without, more slowly. Never leaves staging."""


class Mark(Protocol):
    """A point in the order of a device's copies."""

    def is_done(self) -> bool:
        """Whether everything before it is done. Never waits.

        Raises:
            Exception: a copy has failed.
        """
        ...

    def wait(self) -> None:
        """Return when everything before it is done.

        Raises:
            Exception: a copy has failed.
        """
        ...


class Device(Protocol):
    """One device with one stream for copies.

    Attributes:
        name: for messages, such as ``cuda:0``.
        copies_rows: whether `copy_rows` can be called.
        is_integrated: whether its memory is the host's.
    """

    @property
    def name(self) -> str: ...

    @property
    def copies_rows(self) -> bool: ...

    @property
    def is_integrated(self) -> bool: ...

    def current(self) -> AbstractContextManager[object]:
        """Inside, this thread works with this device.

        A new thread would work with the first device otherwise, and take memory there.
        """
        ...

    def begin(self) -> None:
        """What is asked for from now on comes after what the engine has asked for so far."""
        ...

    def register(self, address: int, size_bytes: int, *, read_only: bool) -> None:
        """Page-lock host memory, whole pages, so that copies need not wait.

        Args:
            read_only: it is mapped without the right to write.

        Raises:
            PinRefusedError: the system does not allow or know it.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`, by the address it had."""
        ...

    def memory(self, size_bytes: int) -> torch.Tensor:
        """New bytes on the device, for use by what is asked for here, until `finish`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy one run of bytes from the host: same dtype and size, both contiguous."""
        ...

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy rows from page-locked memory: two dimensions, contiguous in the last one."""
        ...

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy between tensors on the device, one to one, casts and strides included."""
        ...

    def mark(self) -> Mark:
        """A mark behind all that was asked for so far."""
        ...

    def synchronize(self) -> None:
        """Wait for all that anybody has asked of the device.

        Raises:
            Exception: something of it has failed.
        """
        ...

    def finish(self) -> None:
        """Wait for everything that was asked for here.

        Raises:
            Exception: a copy has failed.
        """
        ...
