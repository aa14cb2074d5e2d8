"""A directory as a source that notes its requests and can refuse listing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastload_common.checkpoint.records import Checkpoint
from fastload_common.errors import AccessDeniedError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.testing.checkpoints import TensorSpec

__all__ = ["RecordingSource", "read_tensors"]

Reads = list[tuple[int, int]]
"""Offsets: the first, and the one behind the last."""


class RecordingSource(LocalSource):
    """A directory whose requests are noted.

    Args:
        directory: absolute path.
        may_list: False answers each listing as a bucket without that permission does.

    Attributes:
        reads: file name, first offset, end offset of each read, in order.
        lists: the ``recursive`` of each listing.
        denied: keys for which `stat` is refused.
    """

    def __init__(self, directory: Path, *, may_list: bool = True) -> None:
        super().__init__(directory)
        self.may_list = may_list
        self.reads: list[tuple[str, int, int]] = []
        self.lists: list[bool] = []
        self.denied: set[str] = set()

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        self.lists.append(recursive)
        if not self.may_list:
            raise AccessDeniedError("listing is not allowed", uri=self.root)
        return super().list(recursive=recursive)

    def stat(self, key: str) -> ObjectId:
        if key in self.denied:
            raise AccessDeniedError("no", uri=f"{self.root}/{key}")
        return super().stat(key)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        whole = byte_range or ByteRange(0, object_id.size_bytes)
        if not whole.size_bytes:
            raise AssertionError("an empty range must never be asked for")
        self.reads.append((object_id.uri.rsplit("/", 1)[1], whole.start, whole.end))
        return super().read(object_id, byte_range)

    def reads_of(self, file: str) -> Reads:
        return [(start, end) for name, start, end in self.reads if name == file]


def read_tensors(source: ObjectSource, checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """The checkpoint's bytes; a tensor without elements is never asked for."""
    return {
        name: TensorSpec(
            entry.dtype,
            entry.shape,
            source.read(entry.object_id, entry.byte_range) if entry.byte_range.size_bytes else b"",
        )
        for name, entry in checkpoint.entries.items()
    }
