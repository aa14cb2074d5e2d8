"""Where a registry sends us for a blob, and how long that is good for. Pure.

Such a URL usually holds a signature: it is never shown, logged or kept longer than it lives.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, urljoin, urlsplit

from fastload_common.errors import SourceError
from fastload_common.source.http_message import Endpoint

__all__ = ["REDIRECTS", "Way", "follow", "good_until_s"]

REDIRECTS = (301, 302, 303, 307, 308)

# Not used near the end of its life: a request may wait a little before it is made.
_MARGIN_S = 30.0
_MARGIN_SHARE = 0.25
_LONGEST_S = 3600.0
_UNKNOWN_S = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    """How to ask for a blob elsewhere.

    Attributes:
        target: path and query; a secret.
        good_until_s: by the wall clock.
        once: nothing tells how long it is good for, so that it is for the next request alone.
    """

    endpoint: Endpoint
    target: str = field(repr=False)
    good_until_s: float
    once: bool = False


def follow(
    location: str | None,
    endpoint: Endpoint,
    target: str,
    make_endpoint: Callable[[str, int, bool], Endpoint],
    now_s: float,
) -> Way:
    """Where a redirect leads.

    Args:
        location: the header, as it came.
        endpoint, target: of the request that was redirected.
        make_endpoint: from host, port and whether TLS is used; raises for what is not allowed.
        now_s: by the wall clock.

    Raises:
        SourceError: it leads nowhere we go. Shows the host at most.
    """
    if not location:
        raise SourceError("the registry redirects without saying where", endpoint=str(endpoint))
    try:
        url = urlsplit(urljoin(f"{endpoint}{target}", location.strip()))
        host, port = url.hostname or "", url.port
    except ValueError:
        raise SourceError(
            "the registry redirects to what is no URL", endpoint=str(endpoint)
        ) from None
    if url.scheme not in ("http", "https") or not host or url.username is not None:
        raise SourceError(
            "the registry redirects to what is no HTTP URL",
            endpoint=str(endpoint),
            scheme=url.scheme[:20],
        )
    tls = url.scheme == "https"
    path = quote(url.path or "/", safe="/%!$&'()*+,;=:@~-._")
    query = f"?{quote(url.query, safe='/%!$&()*+,;=:@~-._?')}" if url.query else ""
    until_s = good_until_s(url.query, now_s)
    found = make_endpoint(host, port or (443 if tls else 80), tls)
    if until_s is None:
        return Way(found, path + query, now_s + _UNKNOWN_S, once=True)
    return Way(found, path + query, until_s)


def good_until_s(query: str, now_s: float) -> float | None:
    """When to stop using a signed URL, by the wall clock; None where it does not tell.

    Knows the parameters of S3 (and what speaks like it), Google's and Azure's stores, CloudFront
    and the older form with an ``Expires`` alone. An hour is the longest that is believed.
    """
    fields = {key.lower(): value for key, value in parse_qsl(query)}
    end_s = None
    for prefix in ("x-amz-", "x-goog-"):
        if f"{prefix}expires" in fields:
            begin_s = _stamp(fields.get(f"{prefix}date", ""), "%Y%m%dT%H%M%SZ")
            life_s = _number(fields[f"{prefix}expires"])
            end_s = None if begin_s is None or life_s is None else begin_s + life_s
    if end_s is None and "expires" in fields:
        end_s = _number(fields["expires"])
    if end_s is None and "se" in fields:
        end_s = _stamp(fields["se"], "%Y-%m-%dT%H:%M:%SZ")
    if end_s is None:
        return None
    end_s = min(end_s, now_s + _LONGEST_S)
    return end_s - min(_MARGIN_S, max(0.0, end_s - now_s) * _MARGIN_SHARE)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def _stamp(text: str, form: str) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(text, form)))
    except ValueError:
        return None
