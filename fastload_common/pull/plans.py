"""What is to be pulled from a URI: every object under a root, or the layers of an artifact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from fastload_common.checkpoint.patterns import matches_any
from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import ObjectMissingError, PullError, SourceError
from fastload_common.pull.records import FileItem, LayerItem, PullPlan
from fastload_common.source.base import ObjectSource, Receiver
from fastload_common.source.oci_image import OciImage
from fastload_common.source.oci_layers import Layer, LayerKind, compression_of, layers_of
from fastload_common.source.oci_reference import OciReference, is_oci_uri, parse_reference
from fastload_common.source.registry import open_source

__all__ = ["PullSource", "open_plan"]

_IMAGE_CONFIGS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
_IMAGE_LAYERS = (
    "application/vnd.oci.image.layer.",
    "application/vnd.docker.image.rootfs.",
)
_CONTENT_DIGEST = "io.deis.oras.content.digest"


class PullSource(Protocol):
    """What the download needs of a source, and its end."""

    def open_receiver(self) -> Receiver: ...

    def close(self) -> None: ...


def open_plan(uri: str, settings: Settings, clock: Clock) -> tuple[PullSource, PullPlan]:
    """Open a source and find what it holds; the caller closes the source.

    Raises:
        ConfigError: no such scheme.
        ObjectMissingError: nothing is there.
        SourceError: it could not be read.
    """
    if is_oci_uri(uri):
        reference = parse_reference(uri)
        image = OciImage(reference, settings, clock)
        try:
            return image, _plan_of_image(image, reference)
        except BaseException:
            image.close()
            raise
    source = open_source(uri, settings)
    try:
        return source, _plan_of_objects(source, settings)
    except BaseException:
        source.close()
        raise


def _plan_of_objects(source: ObjectSource, settings: Settings) -> PullPlan:
    objects = [
        item for item in source.list() if not matches_any(item.key, settings.ignore_patterns)
    ]
    if not objects:
        raise ObjectMissingError(
            f"{source.root}: nothing to pull", hint="see what stands there with your S3 tool"
        )
    return PullPlan(source.root, [FileItem(item.object_id, item.key) for item in objects])


def _plan_of_image(image: OciImage, reference: OciReference) -> PullPlan:
    manifest = image.manifest
    config = manifest.config
    is_image = (
        config is not None
        and config.media_type in _IMAGE_CONFIGS
        and all(layer.media_type.startswith(_IMAGE_LAYERS) for layer in manifest.layers)
    )
    if is_image:
        archives = [Layer(one, LayerKind.COMPRESSED) for one in manifest.layers]
        diff_ids: Sequence[str | None] = _diff_ids(image.config(), len(archives), image.uri)
        found = archives
    else:
        found = layers_of(manifest, image.uri)
        archives = [one for one in found if one.kind in (LayerKind.TAR, LayerKind.COMPRESSED)]
        diff_ids = [one.descriptor.annotations.get(_CONTENT_DIGEST) for one in archives]
    for one in archives:
        if compression_of(one.descriptor.media_type) not in ("", "gzip", "zstd"):
            raise PullError(
                f"a layer of {image.uri} is compressed in a way that is not supported",
                hint="push it again with gzip or zstd",
                media_type=one.descriptor.media_type,
            )
    files = [one for one in found if one.kind is LayerKind.FILE]
    if reference.folder:
        files, archives = _below(reference.folder, files, archives, image.uri)
    if not files and not archives and not is_image:
        raise ObjectMissingError(f"{image.uri}: nothing to pull", hint="is it a model or an image?")
    return PullPlan(
        reference.pinned(image.digest).uri,
        [
            FileItem(image.blob(one.descriptor), one.name, one.descriptor.digest)
            for one in files
            if one.name
        ],
        [
            LayerItem(image.blob(one.descriptor), number, one.descriptor.digest, diff_id)
            for number, (one, diff_id) in enumerate(zip(archives, diff_ids, strict=True))
        ],
        is_image=is_image,
    )


def _below(
    folder: str, files: list[Layer], archives: list[Layer], uri: str
) -> tuple[list[Layer], list[Layer]]:
    """The files of a folder, by their names in it."""
    if archives:
        raise PullError(
            f"{uri} has archives, which are unpacked whole: {folder!r} cannot be pulled alone",
            hint="pull without the folder",
        )
    prefix = folder + "/"
    chosen = [
        Layer(one.descriptor, one.kind, one.name.removeprefix(prefix))
        for one in files
        if one.name.startswith(prefix)
    ]
    return chosen, []


def _diff_ids(config: bytes, count: int, uri: str) -> Sequence[str]:
    """The digests of the layers' contents, which the image's configuration names.

    Raises:
        SourceError: it names none, or not as many as there are layers.
    """
    try:
        found = json.loads(config)["rootfs"]["diff_ids"]
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SourceError(f"the configuration of {uri} names no layers (rootfs.diff_ids)") from None
    if len(found) != count:
        raise SourceError(f"the configuration of {uri} names {len(found)} layers, not {count}")
    return found
