"""Images: what is given, and what a manifest says."""

from __future__ import annotations

from typing import Any

import pytest

from fastload_common.advise.image import (
    LARGE_LAYER_BYTES,
    image_of_manifest,
    image_of_sizes,
)
from fastload_common.errors import ConfigError

GB = 1000**3


def manifest(*sizes: Any) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "config": {"size": 5000},
        "layers": [{"mediaType": "x", "digest": "sha256:0", "size": size} for size in sizes],
    }


def test_layers_above_a_gigabyte_are_counted() -> None:
    image = image_of_manifest("i", manifest(GB, GB + 1, 3 * GB, 10))
    assert image.large_layers == 2, "a layer of exactly 1 GB is not above it"
    assert image.total_bytes == 5 * GB + 11
    assert LARGE_LAYER_BYTES == GB


def test_an_image_without_layers_has_no_large_ones() -> None:
    assert image_of_manifest("i", manifest()).large_layers == 0


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"manifests": []}, "an index of several platforms"),
        ({}, "this has none"),
        ({"layers": {}}, "this has none"),
        (manifest(-1), "a layer with a size"),
        (manifest(True), "a layer with a size"),
        (manifest("5"), "a layer with a size"),
        ({"layers": ["x"]}, "a layer with a size"),
    ],
)
def test_what_is_no_manifest_is_refused(found: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        image_of_manifest("i", found)


def test_sizes_that_are_given() -> None:
    assert image_of_sizes("i", None, []) is None
    only_sum = image_of_sizes("i", 10 * GB, [])
    assert only_sum is not None
    assert only_sum.large_layers is None
    both = image_of_sizes("i", 10 * GB, [4 * GB, 2 * GB])
    assert both is not None
    assert (both.total_bytes, both.large_layers) == (10 * GB, 2)
    only_layers = image_of_sizes("i", None, [4 * GB, 2 * GB])
    assert only_layers is not None
    assert only_layers.total_bytes == 6 * GB


def test_layers_that_do_not_fit_the_image() -> None:
    with pytest.raises(ConfigError, match="as large as all layers"):
        image_of_sizes("i", GB, [2 * GB])
