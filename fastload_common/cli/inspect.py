"""The command ``fastload inspect``: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, Uri, settings_from
from fastload_common.units import format_size

if TYPE_CHECKING:
    from fastload_common.checkpoint.records import Checkpoint

__all__ = ["inspect"]


def inspect(
    uri: Uri,
    assignments: SetOption = None,
    as_json: AsJson = False,
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = True,
) -> None:
    """Print the tensors, dtypes, shards and sizes of a checkpoint. Reads headers only."""
    from fastload_common.load.model_root import open_readable_root
    from fastload_common.load.open_model import open_checkpoint

    settings = settings_from(assignments)
    with contextlib.closing(open_readable_root(uri, settings)) as source:
        checkpoint = open_checkpoint(source, settings, prefer="auto")
    if as_json:
        print_json(_as_dict(checkpoint, with_tensors=tensors))
    else:
        _print(checkpoint, with_tensors=tensors)


def _by_dtype(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """dtype -> (tensors, bytes), the largest first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in checkpoint.entries.values():
        counts[entry.dtype] += 1
        sizes[entry.dtype] += entry.byte_range.size_bytes
    return {dtype: (counts[dtype], size_bytes) for dtype, size_bytes in sizes.most_common()}


def _as_dict(checkpoint: Checkpoint, *, with_tensors: bool) -> dict[str, Any]:
    keys = {shard.object_id.uri: shard.key for shard in checkpoint.shards}
    found: dict[str, Any] = {
        "root": checkpoint.root,
        "tensor_count": len(checkpoint.entries),
        "tensor_bytes": checkpoint.tensor_bytes,
        "dtypes": {
            dtype: {"tensors": count, "bytes": size_bytes}
            for dtype, (count, size_bytes) in _by_dtype(checkpoint).items()
        },
        "shards": [
            {
                "key": shard.key,
                "size_bytes": shard.object_id.size_bytes,
                "header_bytes": shard.header_bytes,
                "tensors": shard.tensor_count,
                "etag": shard.object_id.etag,
            }
            for shard in checkpoint.shards
        ],
        "ignored_keys": list(checkpoint.ignored_keys),
        "metadata": checkpoint.metadata,
    }
    if with_tensors:
        found["tensors"] = [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "shard": keys.get(entry.object_id.uri, entry.object_id.uri),
                "start": entry.byte_range.start,
                "end": entry.byte_range.end,
            }
            for entry in checkpoint.entries.values()
        ]
    return found


def _print(checkpoint: Checkpoint, *, with_tensors: bool) -> None:
    keys = {shard.object_id.uri: shard.key for shard in checkpoint.shards}
    if with_tensors:
        listed = table("tensor", "dtype", "shape", "size", "shard", right=("size",))
        for entry in checkpoint.entries.values():
            listed.add_row(
                entry.name,
                entry.dtype,
                "x".join(map(str, entry.shape)) or "scalar",
                format_size(entry.byte_range.size_bytes),
                keys.get(entry.object_id.uri, entry.object_id.uri),
            )
        show(listed, "")
    shards = table("shard", "size", "tensors", right=("size", "tensors"))
    for shard in checkpoint.shards:
        shards.add_row(shard.key, format_size(shard.object_id.size_bytes), str(shard.tensor_count))
    show(shards, "")
    dtypes = table("dtype", "tensors", "size", right=("tensors", "size"))
    for dtype, (count, size_bytes) in _by_dtype(checkpoint).items():
        dtypes.add_row(dtype, str(count), format_size(size_bytes))
    show(dtypes, "")
    if checkpoint.ignored_keys:
        show(f"not read: {', '.join(checkpoint.ignored_keys)}")
    show(
        f"{checkpoint.root}: {len(checkpoint.entries)} tensors in {len(checkpoint.shards)} "
        f"shards, {format_size(checkpoint.tensor_bytes)}"
    )
