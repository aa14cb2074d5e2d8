"""One setting: its description, and the way from what a person wrote to a checked value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastload_common.errors import ConfigError
from fastload_common.units import format_size, parse_size

__all__ = ["ENV_PREFIX", "Option", "check_value", "parse_value"]

ENV_PREFIX = "FASTLOAD_"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Attributes:
        name: field of `Settings`; the variable is ``FASTLOAD_`` + upper case.
        unit: ``bytes``, ``bytes/s``, ``s``, ``count``, ``path``, ``flag``, ``choice``,
            ``patterns``, ``places``, ``registries`` or ``text``.
        default: the parsed default; None means "chosen by fastload".
        meaning: one or two sentences for the reference page.
        minimum, maximum: smallest and largest value allowed for numbers.
        choices: values allowed for ``choice``.
        since: version that brought it.
    """

    name: str
    unit: str
    default: Any
    meaning: str
    minimum: float = 0
    maximum: float = 0
    choices: tuple[str, ...] = ()
    since: str = "0.1"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def parse_value(option: Option, value: Any, *, shown: str) -> Any:
    """What was given, as the option's type; None means its default.

    Args:
        shown: what messages call it.

    Raises:
        ConfigError: ill-typed or out of range.
    """
    try:
        parsed = _convert(option, value)
    except ConfigError as error:
        raise ConfigError(f"{shown}: {error.what}", hint=error.hint) from None
    except (TypeError, ValueError, OverflowError):
        raise _unexpected(option, value, shown) from None
    check_value(option, parsed, shown=shown)
    return parsed


def check_value(option: Option, value: Any, *, shown: str) -> None:
    """Refuse a parsed value that the option does not allow."""
    if value is None and option.default is None:
        return
    is_number = option.unit in _NUMBERS
    fits = isinstance(value, _KINDS[option.unit]) and not (is_number and isinstance(value, bool))
    if not fits:
        raise _unexpected(option, value, shown)
    if option.choices and value not in option.choices:
        raise ConfigError(
            f"{shown}: expected one of {', '.join(option.choices)}, got {_brief(value)}",
            hint=option.meaning,
        )
    if is_number and not option.minimum <= value <= option.maximum:
        side = "above the maximum" if value > option.maximum else "below the minimum"
        bound = option.maximum if value > option.maximum else option.minimum
        unit = {"s": " s", "bytes/s": "/s"}.get(option.unit, "")
        text = (format_size(bound) if option.unit in _SIZES else f"{bound:g}") + unit
        raise ConfigError(f"{shown}: {_brief(value)} is {side} of {text}", hint=option.meaning)


def _unexpected(option: Option, value: Any, shown: str) -> ConfigError:
    what = f"{shown}: expected {_EXPECTED[option.unit]}, got {_brief(value)}"
    return ConfigError(what, hint=option.meaning)


def _brief(value: Any) -> str:
    """The value for a message, not all of it if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number of too many digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


_SHOWN_CHARACTERS = 100
_SIZES = ("bytes", "bytes/s")
_NUMBERS = (*_SIZES, "s", "count")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "bytes": int,
    "bytes/s": int,
    "s": (int, float),
    "count": int,
    "path": Path,
    "flag": bool,
    "choice": str,
    "patterns": tuple,
    "places": tuple,
    "registries": tuple,
    "text": str,
}
_EXPECTED = {
    "bytes": "a size such as 16MiB",
    "bytes/s": "bytes per second such as 500MB",
    "s": "a number of seconds",
    "count": "a whole number",
    "path": "a path",
    "flag": "true or false",
    "choice": "one of the choices",
    "patterns": "comma-separated globs",
    "places": "comma-separated directories or s3:// prefixes",
    "registries": "comma-separated registries",
    "text": "a text",
}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}


def _convert(option: Option, value: Any) -> Any:
    if value is None:
        return option.default
    if option.unit in _SIZES:
        if not isinstance(value, str | int):
            raise TypeError
        return parse_size(value)
    if option.unit == "count":
        if isinstance(value, bool | float):
            raise TypeError
        return int(value)
    if option.unit == "s":
        if isinstance(value, bool):
            raise TypeError
        seconds = float(value)
        if not 0 <= seconds < float("inf"):
            raise ValueError
        return seconds
    if option.unit == "path":
        if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
            raise TypeError
        return Path(value)
    if option.unit == "flag":
        return value if isinstance(value, bool) else _flag(value)
    if option.unit == "choice":
        return value
    if option.unit == "text":
        return value.strip() if isinstance(value, str) else value
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise TypeError
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, str) or value.strip().lower() not in _FLAGS:
        raise ValueError
    return _FLAGS[value.strip().lower()]
