"""The settings of `fastload pull`; a part of the registry in `config`.

The six of parallel pull have the names that SOCI's configuration gives them.
"""

from __future__ import annotations

from fastload_common.config_values import Option
from fastload_common.units import GIB, KIB, MIB, TIB

__all__ = ["PULL_OPTIONS"]

PULL_OPTIONS: tuple[Option, ...] = (
    Option(
        "max_concurrent_downloads",
        "count",
        None,
        "`fastload pull`: requests in flight of all pulls on this node that have this setting; a "
        "pull that gets none waits. Unset: no bound for the node.",
        minimum=1,
        maximum=4096,
    ),
    Option(
        "max_concurrent_downloads_per_image",
        "count",
        None,
        "`fastload pull`: requests in flight of one pull. Default: what fills the link, found "
        "while pulling, at most 48.",
        minimum=1,
        maximum=4096,
    ),
    Option(
        "concurrent_download_chunk_size",
        "bytes",
        None,
        "`fastload pull`: largest request. Requests are smaller where the memory of a pull does "
        "not hold one of this size for each request in flight. Default: as large as that allows.",
        minimum=64 * KIB,
        maximum=4 * GIB,
    ),
    Option(
        "max_concurrent_unpacks",
        "count",
        None,
        "`fastload pull`: layers that all pulls on this node that have this setting unpack at "
        "once. Unset: no bound for the node.",
        minimum=1,
        maximum=1024,
    ),
    Option(
        "max_concurrent_unpacks_per_image",
        "count",
        None,
        "`fastload pull`: layers of one pull that are unpacked, or files that are compared with "
        "their digest, at once. Default: one for each CPU, 2 to 4. More than 32 count as 32.",
        minimum=1,
        maximum=1024,
    ),
    Option(
        "discard_unpacked_layers",
        "flag",
        True,
        "`fastload pull`: delete a layer's compressed bytes as soon as it is unpacked. Without it "
        "they are kept until the pull ends, which takes their space, and spares fetching them "
        "again where a pull is resumed after the machine was started anew.",
    ),
    Option(
        "max_unpacked_bytes",
        "bytes",
        None,
        "`fastload pull`: most bytes that the layers of one image may unpack to. Default: 1 GiB "
        "and 64 times the compressed size.",
        minimum=1 * MIB,
        maximum=1024 * TIB,
    ),
)
