"""When a refused listing leaves another way: asking for the files by their names. Pure."""

from __future__ import annotations

from fastload_common.errors import AccessDeniedError

__all__ = ["only_listing_is_denied"]


def only_listing_is_denied(error: AccessDeniedError) -> bool:
    """Whether these credentials may be good for reading, though not for listing.

    An unknown key, an expired token, a wrong signature or clock fail every request alike: asking
    for names would only replace the cause by a less telling reply, as replies to HEAD have no body.
    A directory's refusal has neither status nor code.
    """
    status, code = error.fields.get("status"), error.fields.get("code")
    return status in (None, 403) and code in (None, "AccessDenied")
