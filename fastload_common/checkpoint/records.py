"""The records of a checkpoint: which tensor lies where, in which object.

Frozen and plain. Knows names of dtypes only as strings; knows nothing of torch and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["Checkpoint", "Shard", "TensorEntry"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor and the bytes that hold it.

    Attributes:
        name: as the file spells it.
        dtype: safetensors' own name, such as ``"BF16"``; see `checkpoint.dtypes`.
        shape: logical shape; ``()`` for a scalar. Elements of sub-byte dtypes are counted singly.
        object_id: the pinned object.
        byte_range: absolute in the object (its header included). Empty for a tensor without
            elements: nothing must be asked for it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    object_id: ObjectId
    byte_range: ByteRange


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors object of a checkpoint.

    Attributes:
        key: relative to the source's root.
        object_id: its pinned state.
        header_bytes: length field and header together; the data begins here.
        tensor_count: tensors in its header, also those that another shard provides.
    """

    key: str
    object_id: ObjectId
    header_bytes: int
    tensor_count: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model.

    Attributes:
        root: the source's root; safe to print.
        entries: by name, in the order in which the bytes lie: by shard, then by offset.
        shards: in natural order of their keys (``model-2`` before ``model-10``).
        ignored_keys: weight files beside the chosen ones that are not read.
        metadata: the headers' ``__metadata__``, merged; the first shard that has a key wins.
    """

    root: str
    entries: dict[str, TensorEntry]
    shards: tuple[Shard, ...]
    ignored_keys: tuple[str, ...]
    metadata: dict[str, str]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors together, without headers."""
        return sum(entry.byte_range.size_bytes for entry in self.entries.values())
