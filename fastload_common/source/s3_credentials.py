"""Whether credentials can be sent at all. Says which one cannot, and never shows a character of it.

A library that is given a header with a line break puts the header into its error.
"""

from __future__ import annotations

from typing import Any

from fastload_common.errors import AccessDeniedError

__all__ = ["check_sendable"]

_NAMES = {
    "access_key": ("AWS_ACCESS_KEY_ID", "access key"),
    "secret_key": ("AWS_SECRET_ACCESS_KEY", "secret key"),
    "token": ("AWS_SESSION_TOKEN", "session token"),
}


def check_sendable(frozen: Any, method: str, **facts: Any) -> None:
    """Refuse credentials that hold anything but printable ASCII.

    Args:
        frozen: botocore's frozen credentials.
        method: the provider that found them, as botocore calls it.
        facts: fields of the error.

    Raises:
        AccessDeniedError: names the credential and the provider.
    """
    for attribute, (variable, words) in _NAMES.items():
        value = getattr(frozen, attribute) or ""
        if value.isascii() and value.isprintable():
            continue
        name = variable if method == "env" else f"the {words} from {method}"
        found = "a line break" if "\n" in value or "\r" in value else "an unprintable character"
        raise AccessDeniedError(
            f"{name} holds {found}, so no request can be signed with it",
            hint="store it again without one: a text file, or a Secret made by echo, ends in one",
            **facts | {"credentials": method},
        )
