"""Join the shards' headers and the index into one `Checkpoint`. Pure.

Which copy of a tensor counts when several files hold it:

- the index names a file: that file's copy, and no other is ever read;
- the index does not name the tensor, or there is none: the copies must be the same. Dtype and
  shape are compared here, the bytes by the caller (`Duplicate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastload_common.checkpoint.header import Header
from fastload_common.checkpoint.index import CheckpointIndex
from fastload_common.checkpoint.records import Checkpoint, Shard, TensorEntry
from fastload_common.checkpoint.wording import enumerate_some, short
from fastload_common.errors import CheckpointError, TensorMissingError
from fastload_common.ranges import ObjectId

__all__ = ["Duplicate", "ShardHeader", "assemble", "conflict"]


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """One shard and its parsed header."""

    key: str
    object_id: ObjectId
    header: Header


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Two copies of one tensor, alike in dtype and shape, whose bytes must be compared."""

    kept: TensorEntry
    other: TensorEntry


def assemble(
    root: str,
    shards: Sequence[ShardHeader],
    *,
    index: CheckpointIndex | None = None,
    ignored_keys: Sequence[str] = (),
) -> tuple[Checkpoint, tuple[Duplicate, ...]]:
    """Build the checkpoint.

    Args:
        root: the source's root.
        shards: in the order in which their bytes are to be read.
        index: decides per tensor; files of it that are not among the shards are left out.
        ignored_keys: passed on.

    Raises:
        TensorMissingError: the index names a tensor that its file lacks.
        CheckpointError: two files hold a tensor in different dtypes or shapes.
    """
    weight_map = index.weight_map if index else {}
    entries: dict[str, TensorEntry] = {}
    duplicates: list[Duplicate] = []
    metadata: dict[str, str] = {}
    for shard in shards:
        for key, value in shard.header.metadata.items():
            metadata.setdefault(key, value)
        for entry in shard.header.entries:
            if weight_map.get(entry.name, shard.key) != shard.key:
                continue
            kept = entries.setdefault(entry.name, entry)
            if kept is not entry:
                if (kept.dtype, kept.shape) != (entry.dtype, entry.shape):
                    raise conflict(kept, entry)
                duplicates.append(Duplicate(kept, entry))
    if index:
        _check_complete(root, index, shards, entries)
    checkpoint = Checkpoint(
        root=root,
        entries=entries,
        shards=tuple(
            Shard(s.key, s.object_id, s.header.header_bytes, len(s.header.entries)) for s in shards
        ),
        ignored_keys=tuple(ignored_keys),
        metadata=metadata,
    )
    return checkpoint, tuple(duplicates)


def conflict(kept: TensorEntry, other: TensorEntry) -> CheckpointError:
    """The error for two copies of a tensor that differ."""
    alike = (kept.dtype, kept.shape) == (other.dtype, other.shape)
    difference = (
        "with different values"
        if alike
        else f"as {kept.dtype} {list(kept.shape)} and as {other.dtype} {list(other.shape)}"
    )
    return CheckpointError(
        f"tensor {short(kept.name)} stands in {kept.object_id.uri} and in {other.object_id.uri}, "
        f"{difference}",
        hint="add the index file that says which one counts, or remove the stale file",
    )


def _check_complete(
    root: str,
    index: CheckpointIndex,
    shards: Sequence[ShardHeader],
    entries: dict[str, TensorEntry],
) -> None:
    read = {shard.key for shard in shards}
    missing = [
        (name, file)
        for name, file in index.weight_map.items()
        if name not in entries and file in read
    ]
    if not missing:
        return
    elsewhere = {
        entry.name: shard.key
        for shard in shards
        for entry in shard.header.entries
        if entry.name not in entries
    }
    shown = [
        f"{short(name)} in {file}"
        + (f" (it stands in {elsewhere[name]})" if name in elsewhere else "")
        for name, file in missing
    ]
    raise TensorMissingError(
        f"{root}/{index.key} names {len(missing)} tensors that their files lack: "
        f"{enumerate_some(shown)}",
        hint="the index belongs to other shards; upload the one that was written with them",
        missing_tensors=len(missing),
    )
