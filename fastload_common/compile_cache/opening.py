"""From settings to stores."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from fastload_common.clock import Clock
from fastload_common.compile_cache import zstd
from fastload_common.compile_cache.manifest import LIMITS
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.stores.s3 import S3Store
from fastload_common.compile_cache.stores.tiered import TieredStore
from fastload_common.compile_cache.trust import Keys
from fastload_common.config import Settings
from fastload_common.errors import ConfigError
from fastload_common.source.uri import S3Location, parse_root

__all__ = ["open_stores"]

_HINT = "write a directory, s3://bucket/prefix, or both with a comma between them"


def open_stores(settings: Settings, keys: Keys | None, clock: Clock) -> TieredStore:
    """The stores that ``compile_cache`` names; nothing is read or created yet.

    Raises:
        ConfigError: two of a kind, a relative directory, another scheme; or zstd is not there.
    """
    zstd.compressor()
    node: NodeStore | None = None
    remote: S3Store | None = None
    limits = replace(LIMITS, content_bytes=settings.compile_cache_max_bytes)
    for place in settings.compile_cache or ():
        if "://" in place and not place.startswith("file:") and not {"?", "#"}.isdisjoint(place):
            # Not shown: it may be a signed URL.
            raise ConfigError(
                "FASTLOAD_COMPILE_CACHE names an URI with '?' or '#', which no prefix may have",
                hint=f"{_HINT}; credentials come from where all requests to S3 have them",
            )
        root = parse_root(place)
        if isinstance(root, S3Location):
            if remote is not None:
                raise ConfigError("FASTLOAD_COMPILE_CACHE names two prefixes in S3", hint=_HINT)
            remote = S3Store(root.uri, settings, keys=keys, limits=limits, clock=clock)
            continue
        if node is not None:
            raise ConfigError("FASTLOAD_COMPILE_CACHE names two directories", hint=_HINT)
        if not os.path.isabs(place.removeprefix("file://")):
            # Each process would have its own, depending on where it was started.
            raise ConfigError(f"FASTLOAD_COMPILE_CACHE: {place} is relative", hint=_HINT)
        node = NodeStore(
            Path(root),
            max_bytes=settings.compile_cache_max_bytes,
            keys=keys,
            limits=limits,
            forced=settings.compile_cache_force,
            clock=clock,
        )
    if node is None and remote is None:
        raise ConfigError("FASTLOAD_COMPILE_CACHE names nothing", hint=_HINT)
    return TieredStore(node, remote, deadline_s=settings.compile_cache_deadline_s, clock=clock)
