"""Models in a registry, for the tests of both engines."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from fastload_common.testing.registry_server import FILEPATH, RegistryServer

__all__ = ["push_files", "push_image", "served_bytes"]

_RAW = "application/vnd.cncf.model.weight.v1.raw"
_TAR = "application/vnd.oci.image.layer.v1.tar"


def push_files(registry: RegistryServer, repository: str, tag: str, model: Path) -> None:
    """As an artifact: each file is a layer."""
    layers = [
        registry.push_blob(repository, file.read_bytes(), _RAW, {FILEPATH: file.name})
        for file in sorted(model.iterdir())
    ]
    registry.push_manifest(repository, tag, layers)


def push_image(
    registry: RegistryServer,
    repository: str,
    tag: str,
    model: Path,
    folder: str,
    *,
    compressed: bool = False,
) -> None:
    """As an image of one layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.add(model, folder)
    data, media_type = out.getvalue(), _TAR
    if compressed:
        data, media_type = gzip.compress(data, 1), _TAR + "+gzip"
    registry.push_manifest(repository, tag, [registry.push_blob(repository, data, media_type)])


def served_bytes(registry: RegistryServer, repository: str, since: int) -> int:
    """What the registry's own log says that it sent of a repository."""
    path = f"/v2/{repository}/"
    return sum(one.body_bytes for one in registry.requests(since) if one.path.startswith(path))
