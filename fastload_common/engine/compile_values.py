"""An engine's configuration as plain values for a key: no addresses in memory, no places."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

__all__ = ["fields_of", "is_place", "plain", "without_noise"]

_PLACE = re.compile(r"\s*(/|~(/|$)|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]*://)")
_PLACES = ("HOST", "HOSTNAME", "IP", "IPS", "ADDR", "ADDRESS", "PORT", "URL", "ENDPOINT")
_DIRECTORIES = ("HOME", "DIR", "ROOT", "PATH")
_NOISY_LAST = frozenset(
    (*_PLACES, *_DIRECTORIES, "PLUGINS", "UUID", "PID", "INDICES", "PREFIX", "DATE")
)
_NOISY_ANYWHERE = frozenset({"LOG", "LOGGING", "TIMEOUT"})
"""How long something is waited for, and what is said meanwhile, decides no code."""
_OF_NO_CONTENT = frozenset({"_name_or_path", "transformers_version"})
_ADDRESS = re.compile(r"(\d{1,3}(\.\d{1,3}){3}(:\d+)?|[A-Za-z][\w.-]*:\d{3,5})$")
"""An address, or a host and its port; ``cuda:0`` is none."""
_DEPTH = 24


def is_place(value: Any) -> bool:
    """Whether it is a text that names a path or a URL."""
    return isinstance(value, str) and bool(_PLACE.match(value))


def without_noise(
    variables: Mapping[str, Any], known: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Variables of an engine but those that decide no code.

    These name a host, a port, a place, a list of plugins, a time to wait or what is logged.

    Args:
        known: names of further ones.
    """
    return {
        name: value
        for name, value in variables.items()
        if name not in known
        and not _is_noisy(name.upper().split("_"))
        and not is_place(value)
        and not (isinstance(value, str) and _ADDRESS.match(value))
    }


def _is_noisy(parts: list[str]) -> bool:
    return parts[-1] in _NOISY_LAST or not _NOISY_ANYWHERE.isdisjoint(parts)


def fields_of(holder: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those of the named fields that are there, as plain values."""
    return {name: plain(getattr(holder, name)) for name in names if hasattr(holder, name)}


def plain(value: Any, depth: int = 0) -> Any:
    """A JSON value that two processes with the same configuration have in common.

    Texts that name a place say only that; JSON in a text becomes its value; objects become the
    name of their class with their fields, if they are dataclasses.
    """
    if depth > _DEPTH:
        return "..."
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _text(value, depth)
    if isinstance(value, Mapping):
        pairs = sorted((str(key), item) for key, item in value.items())
        return {
            "(a place)" if is_place(key) else key: plain(item, depth + 1)
            for key, item in pairs
            if key not in _OF_NO_CONTENT
        }
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth + 1) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {"class": type(value).__qualname__, **fields_of(value, names)}
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    text = str(value)
    # The default form of an object holds its address.
    return type(value).__qualname__ if " at 0x" in text or is_place(text) else text


def _text(value: str, depth: int) -> Any:
    if is_place(value):
        return "(a place)"
    if value.startswith("{"):
        try:
            return plain(json.loads(value), depth + 1)
        except (ValueError, RecursionError):
            return value
    return value
