"""Globs over keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from fastload_common.errors import ConfigError

__all__ = ["matches", "matches_any"]

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[(?:!?\]?[^\]/]*)\]|.", re.DOTALL)


def matches(key: str, pattern: str) -> bool:
    """Whether a key matches a glob.

    ``*`` and ``?`` stay within one folder, ``**/`` is any number of folders (also none), ``**``
    is anything. A pattern without ``/`` is for the model's own level.

    Raises:
        ConfigError: it is no glob.
    """
    return _compile(pattern).fullmatch(key) is not None


def matches_any(key: str, patterns: Iterable[str]) -> bool:
    """Whether a key matches at least one of the globs."""
    return any(matches(key, pattern) for pattern in patterns)


@lru_cache(maxsize=256)
def _compile(pattern: str) -> re.Pattern[str]:
    expression = "".join(_translate(token) for token in _TOKEN.findall(pattern))
    try:
        return re.compile(expression, re.DOTALL)
    except re.error:
        raise ConfigError(f"{pattern!r} is not a glob", hint="check its [brackets]") from None


def _translate(token: str) -> str:
    if token == "**/":
        return "(?:.*/)?"
    if token == "**":
        return ".*"
    if token == "*":
        return "[^/]*"
    if token == "?":
        return "[^/]"
    if len(token) > 2 and token[0] == "[" and token[-1] == "]":
        inside = token[1:-1]
        negated = inside.startswith("!")
        body = re.sub(r"([\\\]\[&~|^])", r"\\\1", inside[1:] if negated else inside)
        return f"(?!/)[{'^' if negated else ''}{body}]"
    return re.escape(token)
