"""What an S3 server says of a failure, to our errors. One table for every way of asking.

Only the standard library: a process that only receives bytes can use it. Error bodies are searched
for a few elements, not parsed: they come from anybody, and are never data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import unescape

from fastload_common.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectMissingError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.source.http_message import ERROR_BODY_LIMIT_BYTES

__all__ = ["MESSAGE_LIMIT", "S3Fault", "fault_error", "is_expired_token", "parse_fault"]

# The one that names a permission tells of a role and a resource before it.
MESSAGE_LIMIT = 400

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_DENIED = _EXPIRED | {
    "AccessDenied",
    "AccessDeniedException",
    "AllAccessDisabled",
    "InvalidAccessKeyId",
    "InvalidIdentityToken",
    "InvalidToken",
    "InvalidClientTokenId",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "UnauthorizedException",
    "UnrecognizedClientException",
}
_ELSEWHERE = {
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_PASSING = {
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
    "KMS.DependencyTimeoutException",
    "KMS.InternalException",
    "KMS.KMSInternalException",
    "KMS.ThrottlingException",
}
_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_REGION = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")

_DENIED_HINTS = {
    "InvalidAccessKeyId": "the store does not know this access key: is it the right endpoint?",
    "RequestTimeTooSkewed": "clock skew: this machine's clock is wrong: set it (NTP)",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or a proxy changes "
    "requests",
}
_KMS_HINT = (
    "it is encrypted with a KMS key, which must be enabled and allow these credentials kms:Decrypt"
)
_TOKEN_HINT = "the session token has expired: get new credentials"
_DENIED_HINT = "it needs s3:GetObject on the objects and s3:ListBucket on the bucket"


@dataclass(frozen=True, slots=True)
class S3Fault:
    """A reply that is no success. ``code`` may be empty: replies to HEAD have no body."""

    status: int
    code: str
    message: str
    request_id: str | None
    region: str | None
    retry_after_s: float | None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it says that the bucket, or the signature's region, is another one."""
        return (
            self.status in (301, 302, 307, 308)
            or self.code in _ELSEWHERE
            or (self.status == 400 and self.region is not None)
        )

    @property
    def is_about_kms(self) -> bool:
        """Whether the key that the object is encrypted with is the matter."""
        return self.code.startswith("KMS.") or "kms:" in self.message


def is_expired_token(code: str) -> bool:
    """Whether new credentials from the same provider may help."""
    return code in _EXPIRED


def parse_fault(status: int, headers: Mapping[str, str], body: bytes) -> S3Fault:
    """Read what a failed reply says. Header names in lower case."""
    text = body[:ERROR_BODY_LIMIT_BYTES].decode("utf-8", "replace")
    region = headers.get("x-amz-bucket-region") or _element(text, "Region")
    return S3Fault(
        status=status,
        code=_element(text, "Code") or "",
        message=(_element(text, "Message") or "")[:MESSAGE_LIMIT],
        request_id=headers.get("x-amz-request-id") or _element(text, "RequestId"),
        # It becomes a part of a host name.
        region=region if region and _REGION.fullmatch(region) else None,
        retry_after_s=_retry_after_s(headers.get("retry-after")),
    )


def fault_error(fault: S3Fault, asked: str, *, pinned: bool = False, **facts: Any) -> SourceError:
    """The error for a fault.

    Args:
        asked: what was asked, as a verb phrase: ``read s3://bucket/key``.
        pinned: a known state of the object was asked for: if it is gone, it has changed.
        facts: more fields: uri, range, endpoint, region, credentials.
    """
    code = fault.code or None
    facts |= {"status": fault.status, "code": code, "request_id": fault.request_id}
    said = f": {fault.message}" if fault.message else ""
    if fault.code == "NoSuchBucket":
        hint = "check the name, the endpoint and the account"
        return ObjectMissingError(f"no such bucket: could not {asked}", hint=hint, **facts)
    if fault.is_elsewhere:
        return _elsewhere(fault, asked, facts)
    if fault.code in _DENIED or (fault.status in (401, 403) and fault.code not in _PASSING):
        return _denied(fault, asked, said, facts)
    if fault.status in (412, 416) or (pinned and fault.status in (404, 410)):
        return ObjectChangedError(
            f"the object was replaced or deleted after it was listed: could not {asked}",
            hint="do not write to a model that is being loaded; start again",
            **facts,
        )
    if fault.status in (404, 410):
        return ObjectMissingError(f"no such object: could not {asked}", **facts)
    if fault.status in _PASSING_STATUS or fault.code in _PASSING:
        slow = fault.status in (429, 503) or fault.code == "SlowDown"
        return SourceUnavailableError(
            f"the store could not serve this now: {asked}{said}",
            hint="it asks for fewer requests: lower FASTLOAD_CONCURRENCY" if slow else "",
            retry_after_s=fault.retry_after_s,
            **facts,
        )
    hint = _KMS_HINT if fault.is_about_kms else ""
    return SourceError(f"the store refused to {asked}{said}", hint=hint, **facts)


def _elsewhere(fault: S3Fault, asked: str, facts: dict[str, Any]) -> SourceError:
    configured = facts.get("region") or "none"
    if fault.region is not None and fault.region == configured:
        return SourceError(
            f"the store sends us from region {configured} to region {configured}: "
            f"could not {asked}",
            hint="check AWS_ENDPOINT_URL: a proxy or gateway may name a region that is not its own",
            **facts,
        )
    if fault.region is not None:
        return SourceError(
            f"the bucket is in region {fault.region}, not {configured}: could not {asked}",
            hint=f"set AWS_REGION={fault.region}",
            **facts,
        )
    return SourceError(
        f"the bucket is elsewhere than in region {configured}, and the store does not say where: "
        f"could not {asked}",
        hint="set AWS_REGION, or AWS_ENDPOINT_URL_S3, to where the bucket is",
        **facts,
    )


def _denied(fault: S3Fault, asked: str, said: str, facts: dict[str, Any]) -> AccessDeniedError:
    if is_expired_token(fault.code):
        hint = _TOKEN_HINT
    elif facts.get("credentials") == "anonymous":
        hint = "the bucket is not public: unset FASTLOAD_ANONYMOUS and give credentials"
    elif fault.is_about_kms:
        hint = _KMS_HINT
    else:
        hint = _DENIED_HINTS.get(fault.code, _DENIED_HINT)
    return AccessDeniedError(f"not allowed to {asked}{said}", hint=hint, **facts)


def _element(text: str, name: str) -> str | None:
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return unescape(match.group(1)).strip() or None if match else None


def _retry_after_s(value: str | None) -> float | None:
    # The other form, a date, is not sent by object stores.
    return float(value) if value is not None and value.isdecimal() else None
