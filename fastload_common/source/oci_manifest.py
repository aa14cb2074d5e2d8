"""Manifests and indexes as records: bytes from anybody in, checked records out. No I/O."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fastload_common.errors import SourceError
from fastload_common.source.oci_reference import hasher
from fastload_common.units import MIB

__all__ = [
    "ACCEPT",
    "MANIFEST_LIMIT_BYTES",
    "Descriptor",
    "Index",
    "Manifest",
    "choose_manifest",
    "own_platform",
    "parse_document",
]

MANIFEST_LIMIT_BYTES = 4 * MIB
"""What registries themselves accept at most."""

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.artifact.manifest.v1+json",
)
ACCEPT = ", ".join((*_MANIFESTS, *_INDEXES))
"""The Accept header of a request for a manifest."""

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm/v7", "i686": "386"}
_LARGEST_BYTES = 1 << 62
_MOST_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One blob or manifest that another document names. Immutable content: its digest is its state.

    Attributes:
        platform: ``os/architecture[/variant]``; empty where none is told.
    """

    media_type: str
    digest: str
    size_bytes: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One artifact or image.

    Attributes:
        digest: of the document itself.
        artifact_type: empty where none is told.
        config: None for an artifact without one.
        layers: in order, the lowest first.
    """

    digest: str
    media_type: str
    artifact_type: str
    config: Descriptor | None
    layers: tuple[Descriptor, ...]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Index:
    """Several manifests under one name, for several platforms."""

    digest: str
    manifests: tuple[Descriptor, ...]
    annotations: Mapping[str, str]


def own_platform() -> str:
    """This machine's, as registries write it."""
    machine = platform.machine().lower()
    return f"linux/{_MACHINES.get(machine, machine)}"


def parse_document(data: bytes, digest: str, uri: str) -> Manifest | Index:
    """Parse what a registry serves under a tag or digest.

    Args:
        data: at most `MANIFEST_LIMIT_BYTES`; its digest is checked already.
        digest: of the data.
        uri: of the artifact, for messages.

    Raises:
        SourceError: it is neither a manifest nor an index, or a damaged one.
    """
    parser = _Parser(digest, uri)
    try:
        document = json.loads(data, object_pairs_hook=parser.members)
    except (ValueError, RecursionError) as error:
        parser.refuse(f"no JSON ({str(error)[:100]})")
    document = parser.mapping(document, "document")
    version = document.get("schemaVersion")
    media_type = parser.text(document, "mediaType")
    if version == 1:
        parser.refuse("of the first schema, which is too old; push the image again")
    if version != 2 and media_type != _MANIFESTS[2]:
        parser.refuse(f"of schema version {str(version)[:20]!r}, not 2")
    annotations = parser.annotations(document)
    is_index = "manifests" in document
    if is_index == ("layers" in document or "blobs" in document or "config" in document):
        parser.refuse("neither a manifest (config, layers) nor an index (manifests)")
    if media_type and media_type not in (_INDEXES if is_index else _MANIFESTS):
        parser.refuse(f"of a media type that does not fit its content: {media_type[:100]!r}")
    if is_index:
        return Index(digest, parser.descriptors(document, "manifests"), annotations)
    layers = parser.descriptors(document, "layers" if "layers" in document else "blobs")
    config = parser.descriptor(document["config"], "config") if "config" in document else None
    artifact_type = parser.text(document, "artifactType")
    return Manifest(digest, media_type, artifact_type, config, layers, annotations)


def choose_manifest(index: Index, wanted: str, uri: str) -> Descriptor:
    """The manifest for a platform: the one that says so, else the only one that says none.

    Args:
        wanted: ``os/architecture[/variant]``.

    Raises:
        SourceError: there is none, or several that say none.
    """
    # Attestations stand beside the images that they are about.
    usable = [
        one
        for one in index.manifests
        if "vnd.docker.reference.type" not in one.annotations
        and not one.platform.startswith("unknown/")
    ]
    for one in usable:
        if one.platform == wanted:
            return one
    # A variant is a refinement: arm64/v8 is what arm64 means.
    for one in usable:
        if one.platform and (one.platform + "/").startswith(wanted + "/"):
            return one
    for one in usable:
        if one.platform and (wanted + "/").startswith(one.platform + "/"):
            return one
    unnamed = [one for one in usable if not one.platform]
    if len(unnamed) == 1:
        return unnamed[0]
    has = ", ".join(sorted({one.platform or "none told" for one in usable})[:20]) or "nothing"
    raise SourceError(
        f"{uri} has no manifest for {wanted}",
        hint="set FASTLOAD_OCI_PLATFORM to one that it has, or name the manifest's digest",
        has=has,
        index=index.digest,
    )


class _Parser:
    """Takes a document apart; every refusal names it."""

    def __init__(self, digest: str, uri: str) -> None:
        self._digest = digest
        self._uri = uri

    def refuse(self, why: str) -> NoReturn:
        raise SourceError(
            f"the manifest of {self._uri} is {why}",
            hint="does the reference name a model or image? push it again if so",
            digest=self._digest,
        )

    def members(self, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            self.refuse("ambiguous: a key stands in it twice")
        return found

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(f"damaged: {where} is no object")
        return value

    def text(self, document: Mapping[str, Any], key: str) -> str:
        value = document.get(key)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
            self.refuse(f"damaged: {key} is no text")
        return value

    def annotations(self, document: Mapping[str, Any]) -> dict[str, str]:
        value = document.get("annotations")
        if value is None:
            return {}
        found = self.mapping(value, "annotations")
        if not all(isinstance(one, str) for one in found.values()):
            self.refuse("damaged: an annotation is no text")
        return found

    def descriptors(self, document: Mapping[str, Any], key: str) -> tuple[Descriptor, ...]:
        value = document.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.refuse(f"damaged: {key} is no array")
        if len(value) > _MOST_ENTRIES:
            self.refuse(f"too long: {len(value)} {key}")
        return tuple(self.descriptor(one, f"{key}[{i}]") for i, one in enumerate(value))

    def descriptor(self, value: Any, where: str) -> Descriptor:
        found = self.mapping(value, where)
        digest, size_bytes = found.get("digest"), found.get("size")
        if not isinstance(digest, str):
            self.refuse(f"damaged: {where} has no digest")
        try:
            hasher(digest)
        except SourceError as error:
            self.refuse(f"damaged: {where}: {error.what}")
        if type(size_bytes) is not int or not 0 <= size_bytes <= _LARGEST_BYTES:
            self.refuse(f"damaged: {where} has no valid size")
        return Descriptor(
            media_type=self.text(found, "mediaType"),
            digest=digest,
            size_bytes=size_bytes,
            annotations=self.annotations(found),
            platform=self._platform(found, where),
        )

    def _platform(self, found: Mapping[str, Any], where: str) -> str:
        value = found.get("platform")
        if value is None:
            return ""
        told = self.mapping(value, f"{where}.platform")
        parts = [self.text(told, key) for key in ("os", "architecture", "variant")]
        return "/".join(part for part in parts if part)
