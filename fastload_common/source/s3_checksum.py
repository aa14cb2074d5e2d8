"""The checksum of a whole object that S3 keeps, if it keeps one.

Only a CRC of the whole object counts. An object that was uploaded in parts may have a checksum of
its parts' checksums instead (``COMPOSITE``): that says nothing of the bytes unless the parts' sizes
are known. Gateways that keep checksums without naming their type are believed where neither the
value nor the ETag shows that there were parts.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastload_common.checksums.algorithms import ALGORITHMS, Algorithm, Checksum
from fastload_common.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectMissingError,
    SourceError,
)
from fastload_common.ranges import ObjectId
from fastload_common.source.range_reply import if_match, same_etag
from fastload_common.source.s3_session import S3Session

__all__ = ["ChecksumReader", "checksum_in"]

_LOG = logging.getLogger(__name__)

_OF_PARTS = re.compile(r"-[0-9]+\"?$")
_NOT_UNDERSTOOD = (400, 405, 501)


def checksum_in(headers: Mapping[str, str]) -> Checksum | None:
    """The full-object checksum in the head of a reply, names in lower case; None without one."""
    kind = headers.get("x-amz-checksum-type", "").upper()
    if kind not in ("", "FULL_OBJECT"):
        return None
    if not kind and _OF_PARTS.search(headers.get("etag", "")):
        return None
    for algorithm in ALGORITHMS:
        text = headers.get(f"x-amz-checksum-{algorithm.name.lower()}")
        if text is not None:
            return _decoded(algorithm, text)
    return None


def _decoded(algorithm: Algorithm, text: str) -> Checksum | None:
    try:
        value = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return None  # also "...-3": of parts
    if len(value) != algorithm.value_bytes:
        return None
    return Checksum(algorithm, int.from_bytes(value, "big"))


def _changed(
    object_id: ObjectId, found_etag: str | None, fields: Mapping[str, Any]
) -> ObjectChangedError:
    ours = {
        "uri": object_id.uri,
        "expected_etag": object_id.etag,
        "found_etag": found_etag,
    }
    return ObjectChangedError(
        f"{object_id.uri} was replaced or deleted after it was listed",
        hint="do not write to a model that is being loaded; start again",
        **{**fields, **ours},
    )


class ChecksumReader:
    """Asks for the checksums of one bucket's objects. For any thread.

    Says once that they cannot be had, and why.
    """

    def __init__(self, session: S3Session) -> None:
        self._session = session
        self._told = False

    def ask(self, object_id: ObjectId, key: str) -> Checksum | None:
        """See `ObjectSource.stored_checksum`.

        Args:
            key: in the bucket.
        """
        pinned = {} if object_id.etag is None else {"IfMatch": if_match(object_id.etag)}
        asked = f"ask for the checksum of {object_id.uri}"
        try:
            reply = self._session.call(
                "head_object", asked, Key=key, ChecksumMode="ENABLED", **pinned
            )
        except (ObjectChangedError, ObjectMissingError) as error:
            raise _changed(object_id, None, error.fields) from None
        except SourceError as error:
            refused = error.fields.get("status") in _NOT_UNDERSTOOD
            if not refused and not isinstance(error, AccessDeniedError):
                error.fields["uri"] = object_id.uri
                raise
            self._tell(error)
            return None
        found = reply.get("ETag")
        if object_id.etag is not None and found and not same_etag(found, object_id.etag):
            raise _changed(object_id, found, {})
        # Not botocore's own fields: older versions do not know the newer checksums.
        headers = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return checksum_in({str(name).lower(): str(text) for name, text in headers.items()})

    def _tell(self, error: SourceError) -> None:
        if not self._told:
            self._told = True
            _LOG.warning("stored checksums cannot be had, so nothing is compared: %s", error)
