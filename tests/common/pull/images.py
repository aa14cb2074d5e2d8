"""Layers made by hand, images of them, and what a directory holds, for comparisons."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.pull import pull as pulling
from fastload_common.pull.policy import Special
from fastload_common.pull.records import LayerItem, PullPlan, PullReport
from fastload_common.source.base import ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.testing.registry_server import RegistryServer

CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
MTIME_S = 1_700_000_000


@dataclass
class Entry:
    """One entry of an archive, as tarfile would write it."""

    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    mode: int = 0o644
    link: str = ""
    uid: int = 0
    gid: int = 0
    mtime_s: float = MTIME_S
    device: tuple[int, int] = (0, 0)
    pax: dict[str, str] = field(default_factory=dict)

    def info(self) -> tarfile.TarInfo:
        info = tarfile.TarInfo(self.name)
        info.size, info.type, info.mode = len(self.data), self.type, self.mode
        info.linkname, info.uid, info.gid, info.mtime = self.link, self.uid, self.gid, self.mtime_s
        info.devmajor, info.devminor = self.device
        info.pax_headers = dict(self.pax)
        return info


def file(name: str, data: bytes = b"data", **more: Any) -> Entry:
    return Entry(name, data, **more)


def directory(name: str, mode: int = 0o755, **more: Any) -> Entry:
    return Entry(name, type=tarfile.DIRTYPE, mode=mode, **more)


def symlink(name: str, target: str, **more: Any) -> Entry:
    return Entry(name, type=tarfile.SYMTYPE, link=target, mode=0o777, **more)


def link(name: str, target: str) -> Entry:
    return Entry(name, type=tarfile.LNKTYPE, link=target)


def archive(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar archive, not compressed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as made:
        for entry in entries:
            made.addfile(entry.info(), io.BytesIO(entry.data))
    return buffer.getvalue()


def compressed(tar: bytes, how: str) -> bytes:
    if how == "gzip":
        return gzip.compress(tar, 1, mtime=0)
    return zstandard.compress(tar, 1) if how == "zstd" else tar


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def push_layers(
    registry: RegistryServer,
    repository: str,
    tars: Sequence[bytes],
    hows: Iterable[str] = (),
    tag: str = "latest",
) -> None:
    """Store an image of these layers; what it is compressed with by turns, at first gzip."""
    compressions = [*hows] or ["gzip"]
    layers = []
    for number, tar in enumerate(tars):
        how = compressions[number % len(compressions)]
        media_type = LAYER if how == "none" else f"{LAYER}+{how}"
        layers.append(registry.push_blob(repository, compressed(tar, how), media_type))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [sha256(tar) for tar in tars]},
    }
    blob = registry.push_blob(repository, json.dumps(config).encode(), CONFIG)
    registry.push_manifest(repository, tag, layers, config=blob)


@dataclass
class Blobs:
    """Stored layers in a directory, pulled through everything but a registry."""

    root: Path
    is_image: bool = True
    special: Special = "refuse"
    settings: Settings = field(default_factory=Settings)
    source: Callable[[ObjectSource], Any] = lambda source: source
    digests: bool = True

    def pull(
        self, monkeypatch: Any, destination: Path, stored: Sequence[bytes], tars: Sequence[Any]
    ) -> PullReport:
        """Pull these layers.

        Args:
            stored: as a registry would have them.
            tars: what their configuration says that they are, not compressed; None: nothing.
        """
        self.root.mkdir(exist_ok=True)
        source = LocalSource(self.root)
        items = []
        for number, (data, tar) in enumerate(zip(stored, tars, strict=True)):
            name = f"{number}-{hashlib.sha256(data).hexdigest()[:8]}"
            (self.root / name).exists() or (self.root / name).write_bytes(data)
            digest = sha256(data) if self.digests else None
            diff_id = None if tar is None else sha256(tar)
            items.append(LayerItem(source.stat(name), number, digest, diff_id))
        plan = PullPlan(source.root, (), items, is_image=self.is_image)

        def opened(uri: str, settings: Settings, clock: Clock) -> tuple[Any, PullPlan]:
            return self.source(source), plan

        monkeypatch.setattr(pulling, "open_plan", opened)
        return pulling.pull("test", destination, self.settings, special=self.special)


def tree_of(root: Path, *, times: bool = True) -> dict[str, tuple[Any, ...]]:
    """All that can be seen of a directory: kinds, modes, owners, contents, links, times."""
    found: dict[str, tuple[Any, ...]] = {}
    first: dict[int, str] = {}
    for path in sorted([root, *root.rglob("*")], key=str):
        status = path.lstat()
        name = os.fsencode(path.relative_to(root)).decode("utf-8", "backslashreplace")
        content: Any = None
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif not stat.S_ISDIR(status.st_mode):
            content = status.st_rdev
        same = ""
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            same = first.setdefault(status.st_ino, name)
        xattrs = {
            key: os.getxattr(path, key, follow_symlinks=False)
            for key in os.listxattr(path, follow_symlinks=False)
        }
        row: tuple[Any, ...] = (
            stat.S_IFMT(status.st_mode),
            oct(stat.S_IMODE(status.st_mode)),
            status.st_uid,
            status.st_gid,
            content,
            same,
            xattrs,
        )
        found[name] = (*row, status.st_mtime_ns) if times else row
    return found
