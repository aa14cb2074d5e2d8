"""Settings of Run:ai's streamer (``--load-format runai_streamer``), for whoever runs that one.

The rule is the published one: chunks of 4 GiB, and as many readers as the model has chunks, so each
reader takes one chunk and all begin at once. Models of 10, 67 and 140 GB get 3, 17 and 35 readers
by it. That holds for all three only where GB is read as GiB, 1024**3 bytes: with 1000**3 bytes
the larger two would get 16 and 33.
"""

from __future__ import annotations

from fastload_common.advise.machine import Machine
from fastload_common.advise.records import Note, Setting
from fastload_common.units import GIB, format_size

__all__ = ["CHUNK_BYTES", "concurrency_of", "runai_notes", "runai_settings"]

CHUNK_BYTES = 4 * GIB
_TIMEOUT_MS = 3000
_LOW_SPEED_BYTES_PER_S = 1024 * 1024


def concurrency_of(model_bytes: int) -> int:
    """Readers for a model: one for each chunk of 4 GiB, at least one."""
    return max(1, -(-model_bytes // CHUNK_BYTES))


def runai_settings(model_bytes: int, tensor_parallel: int) -> tuple[Setting, ...]:
    """Variables of the streamer, and what goes into ``--model-loader-extra-config``.

    Args:
        model_bytes: all weight files.
        tensor_parallel: ranks that load together.
    """
    readers = concurrency_of(model_bytes)
    shared = tensor_parallel > 1
    return (
        Setting(
            "RUNAI_STREAMER_CHUNK_BYTESIZE",
            CHUNK_BYTES,
            "one chunk is one reader's whole work; its S3 client divides it into ranges itself "
            "(default: 8 MiB)",
        ),
        Setting(
            "RUNAI_STREAMER_CONCURRENCY",
            readers,
            f"ceil({format_size(model_bytes)} / 4 GiB): all chunks are read at once (default: 8)",
        ),
        Setting(
            "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS",
            _TIMEOUT_MS,
            "a request that is too slow for so long is ended and asked again; with the default of "
            "1000 a busy start ends healthy ones",
        ),
        Setting(
            "RUNAI_STREAMER_S3_LOW_SPEED_LIMIT",
            _LOW_SPEED_BYTES_PER_S,
            "what too slow means, in bytes per second; unset, only a silent request is too slow",
        ),
        Setting(
            "distributed",
            shared,
            f"{tensor_parallel} ranks: each reads its part once and passes it on; without it each "
            "reads the whole model (CUDA and ROCm only)"
            if shared
            else "one rank: nothing to share",
        ),
    )


def runai_notes(model_bytes: int, machine: Machine) -> tuple[Note, ...]:
    """What to know before using those settings on this machine."""
    if model_bytes <= machine.memory_bytes // 2:
        return ()
    return (
        f"Run:ai: {concurrency_of(model_bytes)} readers of 4 GiB hold up to "
        f"{format_size(model_bytes)} of host memory at once, and {machine.name} has "
        f"{format_size(machine.memory_bytes)}: set RUNAI_STREAMER_MEMORY_LIMIT below what the pod "
        "may take",
    )
