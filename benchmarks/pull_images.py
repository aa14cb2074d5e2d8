"""The images that `benchmarks.pull` pulls: the one of the issue, and two that are odd.

All contents are made from numbers, so two runs have the same.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fastload_common.testing.registry_server import RegistryServer
from fastload_common.units import GIB, KIB, MIB

__all__ = ["MANY_LAYERS", "make_image", "push_many", "push_windows"]

IMAGE_BYTES = 2 * GIB
LAYERS, LARGE, LARGE_SHARE = 10, 2, 0.4
MANY_LAYERS = 2_000
# Above the largest window, so that all of it is touched.
WINDOW_LAYERS, WINDOW_LAYER_BYTES = 36, 40 * MIB
WINDOW_LOGS = (25, 23)
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CONFIG = "application/vnd.oci.image.config.v1+json"


def make_image(layout: Path, scale: float) -> int:
    """Make an image with umoci; the bytes that it unpacks to."""
    _umoci("init", "--layout", str(layout))
    _umoci("new", "--image", f"{layout}:latest")
    total_bytes = 0
    for number in range(LAYERS):
        share = LARGE_SHARE if number < LARGE else (1 - LARGE * LARGE_SHARE) / (LAYERS - LARGE)
        size_bytes = int(IMAGE_BYTES * scale * share)
        # Not beside each other, as in real images.
        large = number < LARGE
        with tempfile.NamedTemporaryFile(dir=layout.parent, suffix=".tar") as stream:
            with tarfile.open(fileobj=stream, mode="w") as made:
                total_bytes += _fill(made, number, size_bytes, 64 * MIB if large else 40 * KIB)
            stream.flush()
            _umoci("raw", "add-layer", "--image", f"{layout}:latest", stream.name)
    return total_bytes


def _fill(made: tarfile.TarFile, number: int, size_bytes: int, file_bytes: int) -> int:
    noise = random.Random(number)
    block = noise.randbytes(MIB)
    left_bytes, count = size_bytes, 0
    directory = tarfile.TarInfo(f"layer{number}")
    directory.type, directory.mode = tarfile.DIRTYPE, 0o755
    made.addfile(directory)
    while left_bytes > 0:
        info = tarfile.TarInfo(f"layer{number}/d{count % 97}/file{count}")
        info.size = min(file_bytes, left_bytes)
        made.addfile(info, _Content(noise, block, info.size))  # type: ignore[arg-type]
        left_bytes -= info.size
        count += 1
    return size_bytes


class _Content:
    """Half noise that is new each time, half a repetition."""

    def __init__(self, noise: random.Random, block: bytes, size_bytes: int) -> None:
        self._noise = noise
        self._block = block
        self._left_bytes = size_bytes

    def read(self, size_bytes: int) -> bytes:
        size_bytes = min(size_bytes, self._left_bytes)
        self._left_bytes -= size_bytes
        parts = []
        for _ in range(0, size_bytes, 4 * KIB):
            at = self._noise.randrange(len(self._block) - 4 * KIB)
            parts.append(self._noise.randbytes(2 * KIB) + self._block[at : at + 16] * 128)
        return b"".join(parts)[:size_bytes]


def push_windows(registry: RegistryServer, repository: str, scale: float) -> int:
    """Store an image of zstd layers whose windows are 32 and 8 MiB by turns; its unpacked bytes.

    They hardly compress, so the transfer is as full as the windows are.
    """
    import zstandard

    layers = max(4, int(WINDOW_LAYERS * scale))

    def stored() -> Iterator[tuple[bytes, str]]:
        for number in range(layers):
            tar = _tar(f"window{number}", random.Random(number).randbytes(WINDOW_LAYER_BYTES))
            # Without the size in the frame, or the window would be no larger than that.
            parameters = zstandard.ZstdCompressionParameters.from_level(
                1, window_log=WINDOW_LOGS[number % len(WINDOW_LOGS)], write_content_size=False
            )
            compressor = zstandard.ZstdCompressor(compression_params=parameters)
            yield compressor.compress(tar), _digest(tar)

    _push(registry, repository, "zstd", stored())
    return layers * WINDOW_LAYER_BYTES


def push_many(registry: RegistryServer, repository: str, layers: int) -> int:
    """Store an image of so many layers with one small file each; its unpacked bytes."""
    size_bytes = 4 * KIB

    def stored() -> Iterator[tuple[bytes, str]]:
        for number in range(layers):
            data = random.Random(number).randbytes(size_bytes)
            tar = _tar(f"d{number % 97}/file{number}", data)
            yield gzip.compress(tar, 1, mtime=0), _digest(tar)

    _push(registry, repository, "gzip", stored())
    return layers * size_bytes


def _push(
    registry: RegistryServer, repository: str, how: str, stored: Iterator[tuple[bytes, str]]
) -> None:
    layers, diff_ids = [], []
    for data, diff_id in stored:
        layers.append(registry.push_blob(repository, data, f"{_LAYER}+{how}"))
        diff_ids.append(diff_id)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    blob = registry.push_blob(repository, json.dumps(config).encode(), _CONFIG)
    registry.push_manifest(repository, "latest", layers, config=blob)


def _tar(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _umoci(*arguments: str) -> None:
    subprocess.run(["umoci", *arguments], check=True, capture_output=True)
