"""From a URI to its source. Knows which class serves which scheme; opens nothing."""

from __future__ import annotations

from pathlib import Path

from fastload_common.config import Settings
from fastload_common.source.base import ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.source.oci_reference import is_oci_uri, parse_reference
from fastload_common.source.uri import parse_root

__all__ = ["layout_hint", "open_source", "pinned_uri"]


def open_source(uri: str, settings: Settings) -> ObjectSource:
    """The source for a root: S3, a registry (``oci://``), ``file:///directory``, or a path.

    No request is made and no credential is looked for yet. The caller closes the source.

    Raises:
        ConfigError: unknown scheme, no bucket, no repository, or the root of the file system.
    """
    if is_oci_uri(uri):
        from fastload_common.source.oci import OciSource

        return OciSource(parse_reference(uri), settings)
    root = parse_root(uri)
    if isinstance(root, Path):
        return LocalSource(root)
    # Imported here: botocore is not needed for a directory.
    from fastload_common.source.s3 import S3Source

    return S3Source(root, settings)


def layout_hint(source: ObjectSource) -> str:
    """One sentence on what is odd about this root as a model, where the source knows; else empty.

    For the message of whoever found no weights under it.
    """
    return source.layout_hint() if isinstance(source, LocalSource) else ""


def pinned_uri(source: ObjectSource) -> str:
    """The source's root, named so that it cannot come to mean another state where that is possible.

    Raises:
        SourceError: a registry did not answer.
    """
    from fastload_common.source.oci import OciSource

    return source.pinned_uri() if isinstance(source, OciSource) else source.root
