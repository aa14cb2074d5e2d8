"""The planner of orbax v1's `safetensors_layout`, asked about the same boxes.

It is the nearest relative: byte runs of each process's shards, coalesced and cut to ranged reads.
Its processes do not share what they read. Only its planning functions are called, and nothing is
read; the destinations that they slice take no memory.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.planner_boxes import Box

__all__ = ["OrbaxPlanner"]

_MODULE = "orbax.checkpoint.experimental.v1._src.layout.safetensors_layout"
# One byte that looks like 1 TiB.
_NOWHERE = np.broadcast_to(np.zeros(1, dtype=np.uint8), (1 << 40,))


class OrbaxPlanner:
    """Raises ImportError, with what is missing, where it cannot be asked."""

    def __init__(self) -> None:
        try:
            self.version = importlib.metadata.version("orbax-checkpoint")
        except importlib.metadata.PackageNotFoundError:
            raise ImportError("not installed") from None
        self._layout: Any = importlib.import_module(_MODULE)
        for name in ("index_domain_to_byte_runs", "_plan_chunk_reads", "_Read"):
            if not hasattr(self._layout, name):
                raise ImportError(f"{self.version} has no {name}")

    def plan(self, boxes: Sequence[Box], chunk_bytes: int) -> dict[str, float]:
        """Plan the reads of one rank, file by file, as its loader does.

        Returns:
            ``bytes`` and ``requests`` of its reads, ``needed`` bytes, CPU seconds ``plan_s``.
        """
        layout = self._layout
        files: dict[int, list[Box]] = {}
        for box in boxes:
            files.setdefault(box.tensor.object_index, []).append(box)
        found = {"bytes": 0.0, "needed": 0.0, "requests": 0.0}
        started_s = time.thread_time()
        for rows in files.values():
            reads = [
                layout._Read(offset, length, _NOWHERE[offset : offset + length])
                for box in rows
                for offset, length in layout.index_domain_to_byte_runs(
                    box.bounds, box.tensor.shape, box.tensor.itemsize, box.tensor.start
                )
            ]
            _, stats = layout._plan_chunk_reads(reads, None, chunk_bytes)
            found["bytes"] += stats.read_bytes
            found["needed"] += stats.needed_bytes
            found["requests"] += stats.num_gets
        return found | {"plan_s": time.thread_time() - started_s}
