"""AWS Signature Version 4 for a GET without a query: what each ranged read carries.

Credentials, region and service come from botocore; so do all other signatures. For this one request
botocore's signer takes some 300 µs, which at 8 MiB a request was a tenth of all CPU time of a load;
this takes less than 10. The tests compare both. Specification: "Authenticating Requests: Using the
Authorization Header" of the S3 API reference.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
from collections.abc import Mapping

__all__ = ["signed_headers"]

_ALGORITHM = "AWS4-HMAC-SHA256"
_NO_BODY = hashlib.sha256(b"").hexdigest()


def signed_headers(
    path: str,
    host: str,
    headers: Mapping[str, str],
    *,
    access_key: str,
    secret_key: str,
    token: str | None,
    region: str,
    service: str,
    wall_s: float,
) -> dict[str, str]:
    """All headers of a signed GET but Host, which is signed too.

    Args:
        path: as it is sent: encoded, without a query.
        host: the Host header.
        headers: further ones to sign; no names twice, no spaces around values.
        wall_s: the time of the signature, seconds since the epoch.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall_s))
    day = stamp[:8]
    found = dict(headers)
    found["X-Amz-Date"] = stamp
    found["X-Amz-Content-SHA256"] = _NO_BODY
    if token:
        found["X-Amz-Security-Token"] = token
    lowered = sorted([("host", host), *[(name.lower(), text) for name, text in found.items()]])
    names = ";".join([name for name, _ in lowered])
    lines = "".join([f"{name}:{text}\n" for name, text in lowered])
    request = f"GET\n{path}\n\n{lines}\n{names}\n{_NO_BODY}"
    scope = f"{day}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}"
    key = _signing_key(secret_key, day, region, service)
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    found["Authorization"] = (
        f"{_ALGORITHM} Credential={access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return found


@functools.lru_cache(maxsize=4)
def _signing_key(secret_key: str, day: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
