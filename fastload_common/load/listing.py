"""List a model's root, and judge a refusal: whether asking for files by their names is left."""

from __future__ import annotations

from collections.abc import Sequence

from fastload_common.checkpoint.nothing_found import named_like_a_file
from fastload_common.errors import AccessDeniedError, ObjectMissingError
from fastload_common.source.base import ListedObject, ObjectSource

__all__ = ["list_root", "only_listing_is_denied"]


def list_root(source: ObjectSource, *, recursive: bool) -> Sequence[ListedObject]:
    """List, and say what to give instead where the root is a file.

    Raises:
        SourceError: as `ObjectSource.list` does.
    """
    try:
        return source.list(recursive=recursive)
    except ObjectMissingError as error:
        hint = named_like_a_file(source.root)
        if error.hint or not hint:
            raise
        raise ObjectMissingError(error.what, hint=hint, **error.fields) from None


def only_listing_is_denied(error: AccessDeniedError) -> bool:
    """Whether these credentials may be good for reading, though not for listing.

    An unknown key, an expired token, a wrong signature or clock fail every request alike: asking
    for names would only replace the cause by a less telling reply, as replies to HEAD have no body.
    A directory's refusal has neither status nor code.
    """
    status, code = error.fields.get("status"), error.fields.get("code")
    return status in (None, 403) and code in (None, "AccessDenied")
