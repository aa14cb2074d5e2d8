"""The GPUs of this machine by NVIDIA's management library, which needs no CUDA context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

__all__ = ["Gpu", "list_gpus"]

_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its product name, and its compute capability such as ``sm_90``."""

    name: str
    architecture: str


def list_gpus() -> tuple[list[Gpu], str | None]:
    """All GPUs that the driver shows to this process, and the driver's version.

    None without a driver. CUDA_VISIBLE_DEVICES is not looked at: which devices are used is the
    engine's to say (``layout.devices``).
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return [], None
    except (OSError, AttributeError):
        return [], None
    try:
        return _all(library), _driver(library)
    except AttributeError:  # a library that lacks a function
        return [], None
    finally:
        library.nvmlShutdown()


def _all(library: ctypes.CDLL) -> list[Gpu]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        name = ctypes.create_string_buffer(_NAME_BYTES)
        major, minor = ctypes.c_int(), ctypes.c_int()
        told = library.nvmlDeviceGetName(device, name, _NAME_BYTES) == 0
        known = library.nvmlDeviceGetCudaComputeCapability(
            device, ctypes.byref(major), ctypes.byref(minor)
        )
        found.append(
            Gpu(
                name.value.decode("ascii", "replace") if told else "unknown",
                f"sm_{major.value}{minor.value}" if known == 0 else "unknown",
            )
        )
    return found


def _driver(library: ctypes.CDLL) -> str | None:
    version = ctypes.create_string_buffer(_NAME_BYTES)
    if library.nvmlSystemGetDriverVersion(version, _NAME_BYTES) != 0:
        return None
    return version.value.decode("ascii", "replace")
