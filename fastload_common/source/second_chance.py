"""Whether a reply that is not what was asked deserves another request. Decides, asks nothing."""

from __future__ import annotations

import logging

from fastload_common.errors import ObjectChangedError, RangeMismatchError

__all__ = ["may_be_chance"]

_LOG = logging.getLogger(__name__)


def may_be_chance(error: BaseException, tried: set[str], *, new_connection: bool) -> bool:
    """Whether to ask once more, on a new connection, after a reply that is not what was asked.

    One damaged reply must not end a load, and on a kept connection it may be the answer to another
    request. What is wrong twice is how the endpoint is.

    Args:
        tried: what was done about earlier replies for the same range; grows.
        new_connection: whether the reply was the first one of its connection.
    """
    if not isinstance(error, RangeMismatchError | ObjectChangedError) or "reply" in tried:
        return False
    if isinstance(error, ObjectChangedError) and new_connection:
        return False
    tried.add("reply")
    _LOG.info("asked once more after: %s", error)
    return True
