"""The container image: its layers and their sizes, as given or as its manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload_common.errors import ConfigError

__all__ = ["LARGE_LAYER_BYTES", "Image", "image_of_manifest", "image_of_sizes"]

LARGE_LAYER_BYTES = 1000**3
"""A layer above this is worth an unpacker of its own: 1 GB as registries show sizes, compressed."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a registry stores it.

    Attributes:
        reference: its name, or empty.
        total_bytes: all layers, compressed.
        layer_bytes: each layer, compressed; None where only the sum is known.
    """

    reference: str
    total_bytes: int
    layer_bytes: tuple[int, ...] | None

    @property
    def large_layers(self) -> int | None:
        """How many layers are above 1 GB; None where layers are not known."""
        if self.layer_bytes is None:
            return None
        return sum(size_bytes > LARGE_LAYER_BYTES for size_bytes in self.layer_bytes)


def image_of_sizes(reference: str, total_bytes: int | None, layers: Sequence[int]) -> Image | None:
    """The image of given sizes, or None where no size is given.

    Raises:
        ConfigError: the layers together are larger than the image.
    """
    known_bytes = sum(layers)
    if total_bytes is None:
        return Image(reference, known_bytes, tuple(layers)) if layers else None
    if known_bytes > total_bytes:
        raise ConfigError(
            f"the layers have {known_bytes} bytes, the whole image only {total_bytes}",
            hint="give --image-size as large as all layers, or leave it out",
        )
    if not layers:
        return Image(reference, total_bytes, None)
    # What is not named is many small layers: it counts for the download, and is no large layer.
    return Image(reference, total_bytes, tuple(layers))


def image_of_manifest(reference: str, manifest: Mapping[str, Any]) -> Image:
    """The image that an OCI or Docker manifest describes.

    Args:
        manifest: decoded JSON: what ``docker manifest inspect`` or ``skopeo inspect --raw`` prints.

    Raises:
        ConfigError: an index of several platforms, or no manifest.
    """
    if "manifests" in manifest:
        raise ConfigError(
            "this is an index of several platforms, not the manifest of one image",
            hint="take the manifest of the digest whose platform is that of the machine",
        )
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise ConfigError(
            "an image's manifest has a list of layers; this has none",
            hint="take what `docker manifest inspect` or `skopeo inspect --raw` prints",
        )
    sizes = tuple(_size_of(layer) for layer in layers)
    return Image(reference, sum(sizes), sizes)


def _size_of(layer: Any) -> int:
    size_bytes = layer.get("size") if isinstance(layer, dict) else None
    if not isinstance(size_bytes, int) or isinstance(size_bytes, bool) or size_bytes < 0:
        raise ConfigError(f"expected a layer with a size in bytes, got {str(layer)[:100]}")
    return size_bytes
