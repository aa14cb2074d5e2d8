"""Whether a reply is what was asked. Pure: a pinned object, a range and a reply's head in.

A store, gateway or proxy that does not do what it was asked must never turn into wrong weights.
"""

from __future__ import annotations

import re
from typing import Any

from fastload_common.errors import ObjectChangedError, RangeMismatchError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.http_message import ReplyHead

__all__ = ["check_range_reply", "if_match", "pinned_by", "range_header", "same_etag"]

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def range_header(byte_range: ByteRange) -> str:
    """The Range header, whose end is inclusive."""
    return f"bytes={byte_range.start}-{byte_range.end - 1}"


def if_match(etag: str) -> str:
    """The If-Match header: the ETag with the quotes that some listings leave out."""
    return etag if etag.endswith('"') else f'"{etag}"'


def pinned_by(object_id: ObjectId) -> str:
    """The If-Match header that pins an object's state.

    Raises:
        SourceError: the store gives no ETag.
    """
    if object_id.etag is None:
        raise SourceError(
            f"the store gives no ETag for {object_id.uri}, so nobody would see if it were replaced "
            "while it is read",
            hint="the endpoint, or a proxy before it, must pass the ETag on",
        )
    return if_match(object_id.etag)


def same_etag(one: str, other: str) -> bool:
    """Whether two ETags name one state; quotes and a gateway's weak mark do not count."""
    return _bare(one) == _bare(other)


def check_range_reply(object_id: ObjectId, byte_range: ByteRange, head: ReplyHead) -> None:
    """Accept a success whose body is exactly the range of the pinned object.

    Args:
        head: of a reply with a 2xx status; its body is not read yet.

    Raises:
        ObjectChangedError: another ETag or another size of the whole.
        RangeMismatchError: another range or length, or the range was ignored.
    """
    facts: dict[str, Any] = {
        "uri": object_id.uri,
        "range": str(byte_range),
        "status": head.status,
        "content_range": head.headers.get("content-range"),
        "request_id": head.headers.get("x-amz-request-id"),
    }
    found_etag = head.headers.get("etag")
    if object_id.etag is not None:
        if found_etag is None:
            raise RangeMismatchError(
                "the reply has no ETag, so it cannot be told which state of the object it is",
                hint="the endpoint, or a proxy before it, must pass the ETag on",
                **facts,
            )
        if not same_etag(found_etag, object_id.etag):
            raise ObjectChangedError(
                "the object was replaced after it was listed",
                hint="do not write to a model that is being loaded; start again",
                expected_etag=object_id.etag,
                found_etag=found_etag,
                **facts,
            )
    _check_extent(object_id, byte_range, head, facts)
    length = head.content_length
    if length is not None and length != byte_range.size_bytes:
        raise RangeMismatchError(
            f"the reply announces {length} bytes for a range of {byte_range.size_bytes}", **facts
        )


def _check_extent(
    object_id: ObjectId, byte_range: ByteRange, head: ReplyHead, facts: dict[str, Any]
) -> None:
    text = head.headers.get("content-range")
    whole = byte_range == ByteRange(0, object_id.size_bytes)
    if text is None:
        if head.status == 200 and whole:
            return
        raise RangeMismatchError(
            "the endpoint does not honour Range"
            if head.status == 200
            else "the reply does not say which range it holds",
            hint="use the store itself, not a gateway or proxy that serves whole objects only",
            **facts,
        )
    match = _CONTENT_RANGE.fullmatch(text)
    if head.status not in (200, 206) or match is None:
        raise RangeMismatchError("the reply is no answer to a request for a range", **facts)
    if (int(match.group(1)), int(match.group(2)) + 1) != (byte_range.start, byte_range.end):
        raise RangeMismatchError("the reply holds another range than was asked for", **facts)
    if match.group(3) == "*":
        raise RangeMismatchError("the reply does not say how large the object is", **facts)
    if int(match.group(3)) != object_id.size_bytes:
        raise ObjectChangedError(
            "the object has another size than when it was listed",
            expected_bytes=object_id.size_bytes,
            found_bytes=match.group(3),
            **facts,
        )


def _bare(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')
