"""A device as torch knows it: CUDA and ROCm (both ``torch.cuda``), XPU.

Nothing here has a device index but the target's own; rank numbers and ``CUDA_VISIBLE_DEVICES`` are
the engine's business. Rows are copied by ``cudaMemcpy2DAsync`` of the package ``cuda-bindings``,
which CUDA builds of torch bring; without it rows are gathered on the host, within the ring.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fastload_common.staging.device import Device, Mark, PinRefusedError

__all__ = ["TorchDevice", "open_device"]

_log = logging.getLogger(__name__)

_KINDS = ("cuda", "xpu")  # ROCm is "cuda"
# cudaHostRegister: for all contexts; and "the device only reads", which read-only maps need.
_PORTABLE, _READ_ONLY = 1, 8
_NO_ROWS = (
    "slices of columns are gathered on the host, which takes CPU: the package cuda-bindings is of "
    "no use here (%s)"
)


def open_device(device: torch.device) -> Device | None:
    """The runtime of a device; None where torch's own copies must do."""
    if device.type not in _KINDS:
        return None
    return TorchDevice(device)


class TorchDevice:
    """See `Device`.

    Args:
        device: of the kinds that have streams and events; its index is the target's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device=device)
        self._rows = _row_copier() if device.type == "cuda" else None
        self.name = str(device)

    @property
    def copies_rows(self) -> bool:
        return self._rows is not None

    @functools.cached_property
    def is_integrated(self) -> bool:
        properties = self._module.get_device_properties(self._device)
        return bool(getattr(properties, "is_integrated", False))

    def current(self) -> AbstractContextManager[object]:
        return self._module.device(self._device)  # type: ignore[no-any-return]

    def begin(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def register(self, address: int, size_bytes: int, *, read_only: bool) -> None:
        if self._device.type != "cuda":
            raise PinRefusedError(f"not known how for {self._device.type}")
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with self.current():
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(address, size_bytes, flags)
            if int(status) == 0:
                return
            self._forget_error()
        raise PinRefusedError(f"cudaHostRegister: {runtime.cudaGetErrorString(status)}")

    def unregister(self, address: int) -> None:
        with self.current():
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostUnregister(address)
            if int(status) != 0:
                self._forget_error()
                raise RuntimeError(f"cudaHostUnregister: {runtime.cudaGetErrorString(status)}")

    def memory(self, size_bytes: int) -> torch.Tensor:
        # Of the engine's stream: freed after `finish`, it can be used again by the engine.
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._rows is not None
        itemsize = source.element_size()
        with self._module.stream(self._stream):
            self._rows(
                target.data_ptr(),
                target.stride(0) * itemsize,
                source.data_ptr(),
                source.stride(0) * itemsize,
                source.shape[1] * itemsize,
                source.shape[0],
                self._stream.cuda_stream,
            )

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        plain: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        with self._module.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                if target.dtype == source.dtype == torch.uint8 and target.dim() == 1:
                    word = _widest_word(target, source)
                    lists = plain.setdefault(word, ([], []))
                    lists[0].append(target.view(word))
                    lists[1].append(source.view(word))
                else:
                    target.copy_(source)
            for lists in plain.values():
                torch._foreach_copy_(*lists)  # a few kernels for all

    def mark(self) -> Mark:
        return _EventMark(self._module, self._stream, self._device.type)

    def synchronize(self) -> None:
        self._module.synchronize(self._device)

    def finish(self) -> None:
        self._stream.synchronize()

    def _forget_error(self) -> None:
        """A refusal is no failure, but the runtime keeps it and shows it to the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device).add_(1)


class _EventMark:
    """An event; waiting for it does not spin."""

    def __init__(self, module: Any, stream: Any, kind: str) -> None:
        self._event = module.Event(blocking=True) if kind == "cuda" else module.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def _widest_word(*parts: torch.Tensor) -> torch.dtype:
    """What bytes of equal size may be copied as, for their addresses and their size."""
    bits = len(parts[0])
    for part in parts:
        bits |= part.data_ptr() | int(part.storage_offset())
    for word in (torch.int64, torch.int32, torch.int16):
        if bits % word.itemsize == 0:
            return word
    return torch.uint8


@functools.cache
def _row_copier() -> Any:
    """What copies rows from the host, by addresses and bytes; None where there is nothing."""
    if torch.version.cuda is None:
        return None
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        _log.warning(_NO_ROWS, f"it cannot be imported: {error}")
        return None
    status, _ = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess:
        _log.warning(_NO_ROWS, f"{status.name}: is it of a newer CUDA than the driver?")
        return None

    def copy(
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        (status,) = runtime.cudaMemcpy2DAsync(
            target,
            target_pitch,
            source,
            source_pitch,
            width,
            rows,
            runtime.cudaMemcpyKind.cudaMemcpyHostToDevice,
            stream,
        )
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaMemcpy2DAsync: {status.name}")

    return copy
