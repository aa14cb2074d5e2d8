"""What may happen to an entry: bits, lengths and times, at every class of its bytes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from random import Random
from typing import Any

PLACES = (
    *("magic", "payload", "signature", "digest"),
    *("blob-start", "blob-middle", "blob-end"),
)
"""Lines of the manifest, and parts of the archive."""

KINDS = ("flip", "cut", "zeros", "more")
SKEWS_S = (-10 * 365 * 86400.0, 10 * 365 * 86400.0)


def file_of(place: str) -> str:
    return "blob" if place.startswith("blob") else "manifest"


def span_of(place: str, data: bytes) -> tuple[int, int]:
    """Where the class begins and ends in the whole file."""
    if place.startswith("blob"):
        third = len(data) // 3
        part = ("blob-start", "blob-middle", "blob-end").index(place)
        return (part * third, len(data) if part == 2 else (part + 1) * third)
    ends = [0]
    for line in data.split(b"\n")[:-1]:
        ends.append(ends[-1] + len(line) + 1)
    part = ("magic", "payload", "signature", "digest").index(place)
    return (ends[part], ends[part + 1])


def damage(data: bytes, place: str, kind: str, random: Random) -> bytes:
    """The file with one fault in that class."""
    start, end = span_of(place, data)
    position = random.randrange(start, end)
    if kind == "flip":
        flipped = data[position] ^ (1 << random.randrange(8))
        return data[:position] + bytes([flipped]) + data[position + 1 :]
    if kind == "cut":
        return data[:position]
    if kind == "zeros":  # as after a loss of power
        return data[:position] + bytes(min(4096, len(data) - position)) + data[position + 4096 :]
    return data[:position] + random.randbytes(7) + data[position:]


def damage_in_directory(directory: Path, key: str, place: str, kind: str, random: Random) -> bool:
    """In place, as a disk does it; False if there is no such entry."""
    path = directory / "v1/entries" / key / file_of(place)
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        data = path.read_bytes()
        path.write_bytes(damage(data, place, kind, random))
        return True
    return False


def damage_in_bucket(
    client: Any, bucket: str, prefix: str, key: str, place: str, kind: str, random: Random
) -> bool:
    """The same for objects. Blobs are named by their digest: the manifest's is looked up."""
    from fastload_common.compile_cache.manifest import decode_manifest
    from fastload_common.errors import FastloadError

    name = f"{prefix}/v1/manifests/{key}"
    try:
        data = client.get_object(Bucket=bucket, Key=name)["Body"].read()
        if file_of(place) == "blob":
            name = f"{prefix}/v1/blobs/{decode_manifest(data).blob_sha256}"
            data = client.get_object(Bucket=bucket, Key=name)["Body"].read()
        client.put_object(Bucket=bucket, Key=name, Body=damage(data, place, kind, random))
    except (client.exceptions.ClientError, FastloadError, ValueError, IndexError):
        return False
    return True


def skew_times(directories: list[Path], offset_s: float) -> int:
    """Give all that stands there times of another clock; how many."""
    count = 0
    for directory in directories:
        for path in (directory, *directory.rglob("*")):
            with contextlib.suppress(OSError):
                status = path.lstat()
                times = (status.st_atime + offset_s, status.st_mtime + offset_s)
                os.utime(path, times, follow_symlinks=False)
                count += 1
    return count
