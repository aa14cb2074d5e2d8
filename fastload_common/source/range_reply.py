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
    return one == other or _bare(one) == _bare(other)


def check_range_reply(object_id: ObjectId, byte_range: ByteRange, head: ReplyHead) -> None:
    """Accept a success whose body is exactly the range of the pinned object.

    Args:
        head: of a reply with a 2xx status; its body is not read yet.

    Raises:
        ObjectChangedError: another ETag or another size of the whole.
        RangeMismatchError: another range or length, or the range was ignored.
    """
    asked = (object_id, byte_range, head)
    found_etag = head.headers.get("etag")
    if object_id.etag is not None:
        if found_etag is None:
            raise _mismatch(
                "the reply has no ETag, so it cannot be told which state of the object it is",
                *asked,
                hint="the endpoint, or a proxy before it, must pass the ETag on",
            )
        if not same_etag(found_etag, object_id.etag):
            raise ObjectChangedError(
                "the object was replaced after it was listed",
                hint="do not write to a model that is being loaded; start again",
                expected_etag=object_id.etag,
                found_etag=found_etag,
                **_facts(*asked),
            )
    _check_extent(object_id, byte_range, head)
    length = head.content_length
    if length is not None and length != byte_range.size_bytes:
        raise _mismatch(
            f"the reply announces {length} bytes for a range of {byte_range.size_bytes}", *asked
        )


def _check_extent(object_id: ObjectId, byte_range: ByteRange, head: ReplyHead) -> None:
    asked = (object_id, byte_range, head)
    text = head.headers.get("content-range")
    if text is None:
        if head.status == 200 and byte_range == ByteRange(0, object_id.size_bytes):
            return
        raise _mismatch(
            "the endpoint does not honour Range"
            if head.status == 200
            else "the reply does not say which range it holds",
            *asked,
            hint="use the store itself, not a gateway or proxy that serves whole objects only",
        )
    match = _CONTENT_RANGE.fullmatch(text)
    if head.status not in (200, 206) or match is None:
        raise _mismatch("the reply is no answer to a request for a range", *asked)
    if (int(match[1]), int(match[2]) + 1) != (byte_range.start, byte_range.end):
        raise _mismatch("the reply holds another range than was asked for", *asked)
    if match[3] == "*":
        raise _mismatch("the reply does not say how large the object is", *asked)
    if int(match[3]) != object_id.size_bytes:
        raise ObjectChangedError(
            "the object has another size than when it was listed",
            expected_bytes=object_id.size_bytes,
            found_bytes=match[3],
            **_facts(*asked),
        )


def _mismatch(
    what: str, object_id: ObjectId, byte_range: ByteRange, head: ReplyHead, hint: str = ""
) -> RangeMismatchError:
    return RangeMismatchError(what, hint=hint, **_facts(object_id, byte_range, head))


def _facts(object_id: ObjectId, byte_range: ByteRange, head: ReplyHead) -> dict[str, Any]:
    """What every error says."""
    return {
        "uri": object_id.uri,
        "range": str(byte_range),
        "status": head.status,
        "content_range": head.headers.get("content-range"),
        "request_id": head.headers.get("x-amz-request-id"),
    }


def _bare(etag: str) -> str:
    return etag.strip().removeprefix("W/").strip('"')
