"""What registries, and the stores that they send us to, say of a failure, to our errors. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fastload_common.errors import (
    AccessDeniedError,
    ObjectMissingError,
    RangeMismatchError,
    SourceError,
    SourceUnavailableError,
)

__all__ = ["registry_error", "storage_error"]

_MESSAGE_LIMIT = 200
_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_CODE = re.compile(r"[A-Z_]{1,40}")
_XML_CODE = re.compile(r"<Code>([A-Za-z]{1,40})</Code>")
# What could be a signed URL, or a part of one, in a message; or what it was asked with.
_URL = re.compile(r"(?i:basic|bearer)\s+\S+|\S*(?:://|\?|eyJ)\S*")


def registry_error(
    status: int, headers: Mapping[str, str], body: bytes, asked: str, denied_hint: str, **facts: Any
) -> SourceError:
    """The error for a registry's refusal.

    Args:
        headers: names in lower case.
        asked: a verb phrase: ``read the manifest of oci://...``.
        denied_hint: what to do where it denies access.
        facts: fields of the error; no secrets.
    """
    code, message = _said(body)
    facts |= {"status": status, "code": code or None}
    said = f": {message}" if message else ""
    if status in (401, 403) or code in ("UNAUTHORIZED", "DENIED"):
        return AccessDeniedError(f"not allowed to {asked}{said}", hint=denied_hint, **facts)
    if status in (404, 410):
        hint = "check the name; a registry also says so of what credentials may not see"
        return ObjectMissingError(f"not there: could not {asked}{said}", hint=hint, **facts)
    return _other(status, headers, asked, said, facts)


def storage_error(
    status: int, headers: Mapping[str, str], body: bytes, asked: str, registry: str, **facts: Any
) -> SourceError:
    """The error for a refusal of the store that a registry has sent us to.

    Nothing of its text is shown: it may quote the signed request.

    Args:
        registry: who has sent us; ``endpoint`` in the facts is the store.
    """
    match = _XML_CODE.search(body.decode("utf-8", "replace"))
    facts |= {
        "status": status,
        "code": match.group(1) if match else None,
        "redirected_by": registry,
    }
    if status in (401, 403, 400):
        return AccessDeniedError(
            f"the store {facts.get('endpoint')}, where the registry {registry} redirects to, "
            f"refused to {asked}: the registry itself did not, and its users' credentials are not "
            "at fault",
            hint="its signed URLs were refused several times: are the registry's clock and its "
            "storage credentials right, and does a proxy before the store change requests?",
            **facts,
        )
    if status in (404, 410):
        return ObjectMissingError(
            f"the registry's store has lost it: could not {asked}",
            hint="push the artifact again",
            **facts,
        )
    return _other(status, headers, asked, "", facts)


def _other(
    status: int, headers: Mapping[str, str], asked: str, said: str, facts: dict[str, Any]
) -> SourceError:
    if status in _PASSING_STATUS:
        after = headers.get("retry-after", "")
        return SourceUnavailableError(
            f"the registry could not serve this now: {asked}{said}",
            hint="it asks for fewer requests: lower FASTLOAD_CONCURRENCY, or log in"
            if status == 429
            else "",
            retry_after_s=float(after) if after.isdecimal() else None,
            **facts,
        )
    if status == 416:
        return RangeMismatchError(
            f"the blob is shorter than its manifest says: could not {asked}",
            hint="the registry holds a damaged blob: push the artifact again",
            **facts,
        )
    return SourceError(f"the registry refused to {asked}{said}", **facts)


def _said(body: bytes) -> tuple[str, str]:
    """Code and message of an error in the registries' form; empty where there is none."""
    try:
        first = json.loads(body)["errors"][0]
        code, message = first.get("code"), first.get("message")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", ""
    code = code if isinstance(code, str) and _CODE.fullmatch(code) else ""
    message = message if isinstance(message, str) else ""
    shown = "".join(c if c.isprintable() else " " for c in _URL.sub("***", message))
    return code, shown[:_MESSAGE_LIMIT]
