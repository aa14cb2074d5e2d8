"""What a pull fetches and what it came to: plain records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastload_common.ranges import ObjectId

__all__ = ["FileItem", "Item", "LayerItem", "PullPlan", "PullReport"]


@dataclass(frozen=True, slots=True)
class FileItem:
    """An object that becomes one file.

    Attributes:
        name: where, below the destination.
        digest: ``algorithm:hex`` of its bytes; None where only the store's own checksum is known.
    """

    object_id: ObjectId
    name: str
    digest: str | None = None

    @property
    def key(self) -> str:
        """A name for its bytes, that changes with them."""
        return _key(self.object_id, self.digest)


@dataclass(frozen=True, slots=True)
class LayerItem:
    """An archive that is unpacked.

    Attributes:
        number: its place among the layers; the lowest has 0.
        digest: ``algorithm:hex`` of its bytes as they are stored; None: not known.
        diff_id: ``algorithm:hex`` of the archive, not compressed; None: not known.
    """

    object_id: ObjectId
    number: int
    digest: str | None = None
    diff_id: str | None = None

    @property
    def key(self) -> str:
        """A name for its bytes, that changes with them."""
        return _key(self.object_id, self.digest)


Item = FileItem | LayerItem


@dataclass(frozen=True, slots=True)
class PullPlan:
    """All of a pull.

    Attributes:
        uri: what was asked, pinned; safe to print.
        is_image: whether the layers are those of an image's root file system.
    """

    uri: str
    files: Sequence[FileItem] = ()
    layers: Sequence[LayerItem] = ()
    is_image: bool = False

    @property
    def items(self) -> list[Item]:
        return [*self.layers, *self.files]

    @property
    def size_bytes(self) -> int:
        """Of all bytes that are fetched."""
        return sum({item.key: item.object_id.size_bytes for item in self.items}.values())


@dataclass(slots=True)
class PullReport:
    """What a pull came to.

    Attributes:
        size_bytes: of all blobs and files, as they are stored.
        fetched_bytes: of these, what came over the network or from the other disk in this run.
        resumed_bytes: what a former run had left, and what was right.
        streamed_layers: blobs of a store without ranges, fetched as one stream each.
        unpacked_bytes: of all archives.
        left_out: entries that were dropped, such as devices.
        not_owned: files that could not be given to their owner.
        compared: files and layers that were compared with a digest or a checksum.
        transfer: `TransferStats.snapshot`.
    """

    uri: str
    destination: str
    files: int = 0
    layers: int = 0
    entries: int = 0
    size_bytes: int = 0
    fetched_bytes: int = 0
    resumed_bytes: int = 0
    streamed_layers: int = 0
    unpacked_bytes: int = 0
    left_out: int = 0
    not_owned: int = 0
    compared: int = 0
    wall_s: float = 0.0
    transfer: Mapping[str, Any] = field(default_factory=dict)


def _key(object_id: ObjectId, digest: str | None) -> str:
    text = digest or f"{object_id.uri}\n{object_id.etag}\n{object_id.size_bytes}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
