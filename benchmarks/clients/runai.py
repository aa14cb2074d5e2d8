"""Run:ai Model Streamer's `SafetensorsStreamer`, tensors on the CPU, as an engine uses it.

Its settings are variables, which come with the work: none for its defaults, or those that its
documents name (concurrency, chunk size, memory limit; connections and target throughput).
"""

from __future__ import annotations

import ctypes

from benchmarks.work import BUCKET, HEADER_BYTES, Item, Work, check


class RunaiClient:
    """``owned`` false lets it re-use its buffers, which spares fresh memory."""

    def __init__(self, work: Work) -> None:
        from runai_model_streamer import (  # type: ignore[import-not-found,unused-ignore]
            SafetensorsStreamer,
        )

        self._streamer = SafetensorsStreamer
        self._owned = bool((work.options or {}).get("owned", True))

    def receive(self, items: tuple[Item, ...]) -> int:
        size_bytes = len(items) * HEADER_BYTES
        paths = [f"s3://{BUCKET}/{item.name}" for item in items]
        with self._streamer() as streamer:
            streamer.stream_files(paths, owned=self._owned)
            for name, tensor in streamer.get_tensors():
                tensor_bytes = tensor.numel() * tensor.element_size()
                index = int(name.rpartition(".")[2])
                view = (ctypes.c_char * tensor_bytes).from_address(tensor.data_ptr())
                check(memoryview(view).cast("B"), HEADER_BYTES + index * _TENSOR_BYTES)
                size_bytes += tensor_bytes
        return size_bytes

    def close(self) -> None:
        """Each transfer ends its own threads."""


# As native/content.c cuts objects.
_TENSOR_BYTES = 16 << 20


def open_client(work: Work) -> RunaiClient:
    return RunaiClient(work)
