"""Brings what chunks hold to where it belongs: each read to the backend of its target's device.

The device is the one that the target is on, and never a rank's number. The host needs no backend
but a memory copy; devices that torch can copy to beside other work (CUDA, ROCm, XPU) have
`DeviceBackend`; others get torch's own copies, one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

import torch

from fastload_common.clock import Clock, SystemClock
from fastload_common.staging import torch_device
from fastload_common.staging.arena import Arena
from fastload_common.staging.device import Device
from fastload_common.staging.device_backend import DeviceBackend
from fastload_common.staging.placement import ChunkBytes, Placement

__all__ = ["PlacementBackend", "Placer"]


class PlacementBackend(Protocol):
    """How chunks get from staging memory to one kind of target.

    For each chunk: `take` for each read that it holds something of, then `end`. All by one thread.
    """

    def take(self, placement: Placement, chunk: ChunkBytes) -> None:
        """Copy what the chunk holds of a read, now or until `finish`."""
        ...

    def end(self, release: Callable[[], None]) -> None:
        """Nothing more of this chunk: call ``release``, once, when its memory is not read any more.

        From any thread; also where this raises.
        """
        ...

    def finish(self) -> None:
        """Return when everything is in place; raise if something could not be copied."""
        ...

    def settle(self) -> None:
        """Return when no memory is read any more; raise nothing."""
        ...

    def synchronize(self) -> None:
        """Return when the device has done what anybody asked it for."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class HostBackend:
    """Targets in host memory, and devices that only torch knows: a copy, and it is done."""

    def take(self, placement: Placement, chunk: ChunkBytes) -> None:
        placement.take(chunk)

    def end(self, release: Callable[[], None]) -> None:
        release()

    def finish(self) -> None: ...

    def settle(self) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class Placer:
    """For one load. Use from one thread; what `let_go` is given may be called by others.

    Args:
        arena: this rank's staging memory; None: everything is copied as to the host.
        clock: measures.
        open_device: gives a device's runtime, or None where it has none that is of use here;
            default: torch's.
        threaded: see `Pending`.
    """

    def __init__(
        self,
        arena: Arena | None = None,
        clock: Clock | None = None,
        *,
        open_device: Callable[[torch.device], Device | None] | None = None,
        threaded: bool = True,
    ) -> None:
        self._arena = arena
        self._clock = clock or SystemClock()
        self._open_device = open_device or torch_device.open_device
        self._threaded = threaded
        self._host: PlacementBackend = HostBackend()
        self._backends: dict[torch.device, PlacementBackend] = {}
        self._users: list[PlacementBackend] = []  # of the chunk that is being placed
        self._facts: dict[str, object] = {}

    def expect(self, devices: Iterable[torch.device], size_bytes: int) -> None:
        """Targets on these devices will come: pin memory beside what else there is to do.

        Args:
            size_bytes: what may have to be fetched; no more slots are pinned than that needs.
        """
        for device in devices:
            backend = self._backend_of(device)
            if isinstance(backend, DeviceBackend) and self._arena is not None:
                backend.start(-(-size_bytes // self._arena.slot_bytes))

    @contextmanager
    def run(
        self, timed: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Inside, chunks are placed; at its end everything is in place, or it raises.

        Args:
            timed: gives what stands around the wait at the end.

        Raises:
            DeviceCopyError: a copy has failed.
        """
        try:
            yield
        except BaseException:
            for backend in self._backends.values():
                backend.settle()
            raise
        with timed():
            for backend in self._backends.values():
                backend.finish()

    def take(self, placement: Placement, chunk: ChunkBytes) -> None:
        """Copy what a chunk holds of a read; `let_go` must follow, before the next chunk."""
        device = placement.device
        backend = self._host if device is None else self._backend_of(device)
        if backend is self._host:
            placement.take(chunk)
            return
        if backend not in self._users:
            self._users.append(backend)
        backend.take(placement, chunk)

    def release_done(self) -> None:
        """Give back what is not read any more; only where nothing is threaded."""
        for backend in self._backends.values():
            if isinstance(backend, DeviceBackend):
                backend.release_done()

    def let_go(self, release: Callable[[], None]) -> None:
        """All of this chunk was taken: have ``release`` called when nobody reads it any more."""
        users, self._users = self._users, []
        if len(users) > 1:
            release = _Last(len(users), release)
        for number, user in enumerate(users):
            try:
                user.end(release)
            except BaseException:
                for other in users[number + 1 :]:
                    self._end_quietly(other, release)
                raise
        if not users:
            release()

    def synchronize(self) -> None:
        """Wait for what the engine itself has queued on the devices that were placed on.

        Raises:
            DeviceCopyError: something of it has failed.
        """
        for backend in self._backends.values():
            backend.synchronize()

    @property
    def facts(self) -> dict[str, object]:
        """Numbers of each device, by its name; after `close`."""
        return self._facts

    @property
    def peak_staging_bytes(self) -> int:
        """The most staging memory that was leased at one time."""
        return 0 if self._arena is None else self._arena.peak_leased_bytes

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        while self._backends:
            device, backend = self._backends.popitem()
            if isinstance(backend, DeviceBackend):
                self._facts[str(device)] = backend.facts
            backend.close()

    def _backend_of(self, device: torch.device) -> PlacementBackend:
        backend = self._backends.get(device)
        if backend is None:
            runtime = None if self._arena is None else self._open_device(device)
            if runtime is None or self._arena is None:
                backend = self._host
            else:
                backend = DeviceBackend(runtime, self._arena, self._clock, threaded=self._threaded)
            self._backends[device] = backend
        return backend

    @staticmethod
    def _end_quietly(backend: PlacementBackend, release: Callable[[], None]) -> None:
        """After another one's error, which is raised: this one's is kept, and comes to nothing."""
        with suppress(Exception):
            backend.end(release)


class _Last:
    """Calls what it was given when it is called for the last time of so many. For any thread."""

    def __init__(self, count: int, release: Callable[[], None]) -> None:
        self._left = count
        self._release = release
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            self._release()
