"""What a layer is: one file, an archive of files, or what cannot be read in its place. Pure.

Knows the artifacts of CNCF ModelPack, Docker's models, ORAS, KitOps, and container images.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastload_common.errors import SourceError
from fastload_common.source.oci_manifest import Descriptor, Manifest

__all__ = ["Layer", "LayerKind", "compression_of", "layers_of"]

TITLE = "org.opencontainers.image.title"
_NAMES = ("org.cncf.model.filepath", "org.cnai.model.filepath", TITLE)
_UNPACK = "io.deis.oras.content.unpack"
_COMPRESSION = re.compile(r"[.+](gzip|gz|zstd|zst|bzip2|bz2|xz|lz4)$")
_TAR = re.compile(r"[./-]tar$")
# ORAS gives this type to any file that is pushed without one.
_IMAGE_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
)
_EMPTY = "application/vnd.oci.empty.v1+json"
# Roles of layers that no engine reads.
_ASIDE = re.compile(
    r"application/vnd\.(?:cncf\.model|cnai\.model|kitops\.modelkit)"
    r"\.(?:doc|docs|code|dataset|prompt)\.",
)
_DOCKER_SAFETENSORS = "application/vnd.docker.ai.safetensors"
_USUAL_NAMES = {
    "application/vnd.docker.ai.license": "LICENSE",
    "application/vnd.docker.ai.chat.template.jinja": "chat_template.jinja",
}


class LayerKind(enum.Enum):
    """How a layer's files can be read."""

    FILE = "file"
    TAR = "tar"
    COMPRESSED = "compressed"
    ASIDE = "aside"  # not a part of what is loaded


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        name: of a file, relative to the root; else empty.
    """

    descriptor: Descriptor
    kind: LayerKind
    name: str = ""


def compression_of(media_type: str) -> str:
    """How a layer is compressed, by its media type's end: ``gzip``, ``zstd``, ...; empty: not."""
    match = _COMPRESSION.search(media_type.lower())
    if match is None:
        return ""
    return {"gz": "gzip", "zst": "zstd", "bz2": "bzip2"}.get(match.group(1), match.group(1))


def layers_of(manifest: Manifest, uri: str) -> list[Layer]:
    """The layers in their order.

    Args:
        uri: of the artifact, for messages.

    Raises:
        SourceError: two are files of one name, or a name is none.
    """
    unnamed = [one for one in manifest.layers if _is_unnamed_safetensors(one)]
    found = [_layer(one, unnamed, uri) for one in manifest.layers]
    files: dict[str, str] = {}
    for layer in found:
        if layer.kind is LayerKind.FILE:
            digest = layer.descriptor.digest
            if files.setdefault(layer.name, digest) != digest:
                raise SourceError(
                    f"{uri} has two layers that are both called {layer.name}",
                    hint="push the artifact again with each file once",
                    digests=f"{files[layer.name]}, {digest}",
                )
    return found


def _layer(layer: Descriptor, unnamed: Sequence[Descriptor], uri: str) -> Layer:
    media_type = layer.media_type.lower().partition(";")[0].strip()
    name = next((layer.annotations[key] for key in _NAMES if layer.annotations.get(key)), "")
    if media_type == _EMPTY or _ASIDE.match(media_type):
        return Layer(layer, LayerKind.ASIDE)
    if compression_of(media_type):
        return Layer(layer, LayerKind.COMPRESSED)
    if _TAR.search(media_type) and not _is_plain_file(layer, media_type):
        return Layer(layer, LayerKind.TAR)
    if not name and layer in unnamed:
        name = _shard_name(unnamed.index(layer), len(unnamed))
    name = name or _USUAL_NAMES.get(media_type, "")
    if not name:
        return Layer(layer, LayerKind.ASIDE)
    return Layer(layer, LayerKind.FILE, _checked(name, uri))


def _is_plain_file(layer: Descriptor, media_type: str) -> bool:
    """Whether the type says tar, but the layer is a file with that title."""
    title = layer.annotations.get(TITLE, "")
    is_titled = bool(title) and not title.endswith(".tar")
    return media_type in _IMAGE_LAYERS and is_titled and layer.annotations.get(_UNPACK) != "true"


def _is_unnamed_safetensors(layer: Descriptor) -> bool:
    """A shard as Docker's older models have them: their order is their number."""
    is_named = any(layer.annotations.get(key) for key in _NAMES)
    return layer.media_type.lower() == _DOCKER_SAFETENSORS and not is_named


def _shard_name(index: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def _checked(name: str, uri: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    is_odd = name.startswith("/") or ".." in parts or not parts or not name.isprintable()
    if is_odd or len(name) > 4096:
        raise SourceError(
            f"{uri} has a layer whose name no file can have: {name[:100]!r}",
            hint="push the artifact again from the model's own directory",
        )
    return "/".join(parts)
