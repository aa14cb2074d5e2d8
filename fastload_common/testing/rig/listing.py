"""ListObjectsV2: pages of at most 1000 keys and common prefixes, with continuation tokens."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from urllib.parse import quote
from xml.sax.saxutils import escape

from fastload_common.testing.rig.objects import StoredObject

__all__ = ["listing_xml"]

# Characters that a client must encode when it passes the token on.
_TOKEN_MARK = "+/="


def listing_xml(
    bucket: str, objects: Mapping[str, StoredObject], query: Mapping[str, str], page_keys: int
) -> bytes:
    """The page that a request asks for.

    Args:
        objects: by key.
        page_keys: most rows in a page, whatever the request says.
    """
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    token = query.get("continuation-token")
    after = query.get("start-after", "") if token is None else _key_of(token)
    rows = _rows(sorted(key for key in objects if key.startswith(prefix)), prefix, delimiter)
    rows = [row for row in rows if row > after]
    limit = min(page_keys, int(query.get("max-keys", page_keys)))
    shown, more = rows[:limit], len(rows) > limit
    encode = quote if query.get("encoding-type") == "url" else escape
    parts = ['<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult>']
    parts.append(f"<Name>{bucket}</Name><Prefix>{encode(prefix)}</Prefix>")
    parts.append(f"<MaxKeys>{limit}</MaxKeys><KeyCount>{len(shown)}</KeyCount>")
    parts.append(f"<IsTruncated>{str(more).lower()}</IsTruncated>")
    if delimiter:
        parts.append(f"<Delimiter>{encode(delimiter)}</Delimiter>")
    if "encoding-type" in query:
        parts.append(f"<EncodingType>{query['encoding-type']}</EncodingType>")
    if more:
        last = shown[-1] if shown else after
        parts.append(f"<NextContinuationToken>{_token_for(last)}</NextContinuationToken>")
    for row in shown:
        if row in objects and not _is_folder(row, prefix, delimiter):
            parts.append(_contents(encode(row), objects[row]))
        else:
            parts.append(f"<CommonPrefixes><Prefix>{encode(row)}</Prefix></CommonPrefixes>")
    parts.append("</ListBucketResult>")
    return "".join(parts).encode()


def _rows(keys: list[str], prefix: str, delimiter: str) -> list[str]:
    """Keys, and of those with the delimiter after the prefix the common part once."""
    if not delimiter:
        return keys
    rows: dict[str, None] = {}
    for key in keys:
        head, found, _ = key[len(prefix) :].partition(delimiter)
        rows[prefix + head + found] = None
    return sorted(rows)


def _is_folder(row: str, prefix: str, delimiter: str) -> bool:
    return bool(delimiter) and delimiter in row[len(prefix) :]


def _contents(key: str, stored: StoredObject) -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(stored.etag)}</ETag><Size>{stored.size_bytes}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
    )


def _token_for(key: str) -> str:
    return _TOKEN_MARK + base64.b64encode(key.encode()).decode()


def _key_of(token: str) -> str:
    return base64.b64decode(token.removeprefix(_TOKEN_MARK)).decode()
