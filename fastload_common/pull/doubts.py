"""Blobs that are not what their digest says: whoever sent them is not asked again."""

from __future__ import annotations

from collections.abc import Iterable

from fastload_common.errors import ChecksumMismatchError
from fastload_common.ranges import ObjectId
from fastload_common.source.oci_image import OciImage

__all__ = ["ask_elsewhere"]


def ask_elsewhere(
    source: object, object_ids: Iterable[ObjectId], error: ChecksumMismatchError
) -> bool:
    """Have blobs read from the next place that may have them.

    Args:
        object_ids: what is not verified; that of the error is among them.
        error: told who was asked for its blob.

    Returns:
        Whether there is such a place: a registry behind a mirror.
    """
    if not isinstance(source, OciImage):
        return False
    # Of the other blobs nobody knows; the same mirror has sent them.
    ids = list(object_ids)
    wrong = str(error.fields.get("expected", ""))
    senders = {source.senders(one) for one in ids if one.etag == wrong} - {""}
    if senders:
        error.fields.setdefault("endpoint", ", ".join(sorted(senders)))
    moved = [source.doubt(one, error) for one in ids]
    return any(moved)
