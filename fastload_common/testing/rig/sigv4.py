"""Whether a request is signed as AWS asks (Signature Version 4, in headers or in the query).

Written from the specification with the standard library alone, so that it shares no mistake with
the signers that are tested against it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote

from fastload_common.testing.rig.effects import Error

__all__ = ["AccessKey", "SignedRequest", "check_signature"]

_ALGORITHM = "AWS4-HMAC-SHA256"
_AUTHORIZATION = re.compile(
    _ALGORITHM + r" Credential=([^,\s]+),\s*SignedHeaders=([^,\s]+),\s*Signature=([0-9a-f]{64})"
)
_SCOPE = re.compile(r"(.+)/(\d{8})/([a-z0-9-]+)/s3/aws4_request")
_TIME = "%Y%m%dT%H%M%SZ"
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AccessKey:
    """One that the rig knows.

    Attributes:
        token: the session token that must come with it; None: a long-lived key.
        expires_wall_s: from then on, by the rig's clock, the token has expired.
    """

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires_wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """What a signature covers. ``target`` is path and query as sent; header names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What the request says of its own signature."""

    scope: str
    signed_headers: str
    signature: str
    time: str
    token: str | None
    payload: str
    valid_s: float | None


def signature_region(headers: Mapping[str, str]) -> str | None:
    """The region that an Authorization header names."""
    match = _AUTHORIZATION.match(headers.get("authorization", ""))
    scope = _SCOPE.fullmatch(match.group(1)) if match else None
    return scope.group(3) if scope else None


def check_signature(
    request: SignedRequest, keys: Mapping[str, AccessKey], now_wall_s: float, max_skew_s: float
) -> Error | None:
    """What S3 would answer instead; None: the signature is good.

    Args:
        keys: by access key.
        now_wall_s: by the server's clock.
        max_skew_s: how far the request's time may be from it (S3: 900).
    """
    claim = _claim(request)
    if claim is None:
        return Error(403, "AccessDenied")
    if isinstance(claim, Error):
        return claim
    scope = _SCOPE.fullmatch(claim.scope)
    if scope is None or not claim.time.startswith(scope.group(2)):
        return Error(400, "AuthorizationHeaderMalformed")
    key = keys.get(scope.group(1))
    if key is None:
        return Error(403, "InvalidAccessKeyId")
    signature = _sign(request, claim, key.secret_key, scope.group(2), scope.group(3))
    if not hmac.compare_digest(signature, claim.signature):
        return Error(403, "SignatureDoesNotMatch")
    if claim.token != key.token:
        return Error(400, "InvalidToken")
    if key.expires_wall_s is not None and now_wall_s >= key.expires_wall_s:
        return Error(400, "ExpiredToken")
    return _check_time(claim, now_wall_s, max_skew_s) or _check_body(request, claim)


def _check_time(claim: _Claim, now_wall_s: float, max_skew_s: float) -> Error | None:
    try:
        asked = datetime.datetime.strptime(claim.time, _TIME).replace(tzinfo=datetime.UTC)
    except ValueError:
        return Error(403, "AccessDenied")
    age_s = now_wall_s - asked.timestamp()
    if claim.valid_s is not None:
        return None if -max_skew_s <= age_s <= claim.valid_s else Error(403, "AccessDenied")
    return None if abs(age_s) <= max_skew_s else Error(403, "RequestTimeTooSkewed")


def _check_body(request: SignedRequest, claim: _Claim) -> Error | None:
    if _HEX_SHA256.fullmatch(claim.payload) is None:
        return None  # UNSIGNED-PAYLOAD and the STREAMING forms say nothing of the whole body
    if hashlib.sha256(request.body).hexdigest() == claim.payload:
        return None
    return Error(400, "XAmzContentSHA256Mismatch")


def _claim(request: SignedRequest) -> _Claim | Error | None:
    headers = request.headers
    query = dict(parse_qsl(request.target.partition("?")[2], keep_blank_values=True))
    if query.get("X-Amz-Algorithm") == _ALGORITHM:
        wanted = ("Credential", "SignedHeaders", "Signature", "Date", "Expires")
        if any(f"X-Amz-{name}" not in query for name in wanted):
            return Error(400, "AuthorizationQueryParametersError")
        return _Claim(
            query["X-Amz-Credential"],
            query["X-Amz-SignedHeaders"],
            query["X-Amz-Signature"],
            query["X-Amz-Date"],
            query.get("X-Amz-Security-Token"),
            headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
            float(query["X-Amz-Expires"]),
        )
    if "authorization" not in headers:
        return None
    match = _AUTHORIZATION.fullmatch(headers["authorization"])
    if match is None or "host" not in match.group(2).split(";"):
        return Error(400, "AuthorizationHeaderMalformed")
    if "x-amz-content-sha256" not in headers:
        return Error(400, "InvalidRequest")
    return _Claim(
        match.group(1),
        match.group(2),
        match.group(3),
        headers.get("x-amz-date", ""),
        headers.get("x-amz-security-token"),
        headers["x-amz-content-sha256"],
        None,
    )


def _sign(request: SignedRequest, claim: _Claim, secret: str, date: str, region: str) -> str:
    digest = hashlib.sha256(_canonical(request, claim).encode()).hexdigest()
    scope = f"{date}/{region}/s3/aws4_request"
    key = f"AWS4{secret}".encode()
    for part in (date, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"{_ALGORITHM}\n{claim.time}\n{scope}\n{digest}"
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _canonical(request: SignedRequest, claim: _Claim) -> str:
    path, _, query = request.target.partition("?")
    pairs = sorted(
        (_encode(name), _encode(value))
        for name, value in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)
        if name != "X-Amz-Signature"
    )
    names = claim.signed_headers.split(";")
    lines = [f"{name}:{' '.join(request.headers.get(name, '').split())}\n" for name in names]
    return "\n".join(
        [
            request.method,
            quote(unquote(path), safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            "".join(lines),
            claim.signed_headers,
            claim.payload,
        ]
    )


def _encode(text: str) -> str:
    return quote(text, safe="-_.~")
