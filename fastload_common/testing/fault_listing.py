"""The listings (ListObjectsV2) of `fault_server`, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from fastload_common.testing.fault_server import FaultServer, SeenRequest

__all__ = ["listing_xml"]

# Clients must pass a token on as it is; these characters tell who encodes it wrongly.
_TOKEN = "t+/="


def listing_xml(server: FaultServer, request: SeenRequest) -> bytes:
    """The page that a request asks for."""
    query = {name: values[0] for name, values in request.query.items()}
    bucket = request.name
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    keys = sorted(
        name.removeprefix(f"{bucket}/")
        for name in server.objects
        if name.startswith(f"{bucket}/{prefix}")
    )
    folders: list[str] = []
    if delimiter:
        inside = {key for key in keys if delimiter in key[len(prefix) :]}
        folders = sorted({_folder(key, prefix, delimiter) for key in inside})
        keys = [key for key in keys if key not in inside]
    page = int(query.get("continuation-token", _TOKEN + "0").removeprefix(_TOKEN))
    first = max(page - server.empty_pages, 0) * server.page_keys
    shown = keys[first : first + server.page_keys] if page >= server.empty_pages else []
    more = page < server.empty_pages or first + server.page_keys < len(keys)
    encode = quote if query.get("encoding-type") == "url" else escape
    parts = ['<?xml version="1.0" encoding="UTF-8"?>', "<ListBucketResult>"]
    parts += [f"<Name>{bucket}</Name><Prefix>{encode(prefix)}</Prefix>"]
    parts += [f"<KeyCount>{len(shown)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"]
    if more:
        parts.append(f"<NextContinuationToken>{_TOKEN}{page + 1}</NextContinuationToken>")
    if "encoding-type" in query:
        parts.append("<EncodingType>url</EncodingType>")
    for key in shown:
        data, etag = server.objects[f"{bucket}/{key}"]
        row = f"<Key>{encode(key)}</Key><ETag>{escape(etag)}</ETag><Size>{len(data)}</Size>"
        parts.append(f"<Contents>{row}</Contents>")
    for folder in folders if not more else ():
        parts.append(f"<CommonPrefixes><Prefix>{encode(folder)}</Prefix></CommonPrefixes>")
    parts.append("</ListBucketResult>")
    return "".join(parts).encode()


def _folder(key: str, prefix: str, delimiter: str) -> str:
    return prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter
