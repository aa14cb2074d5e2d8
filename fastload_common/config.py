"""Every setting of fastload, once: name, unit, default, meaning. The only reader of `os.environ`.

`OPTIONS` is the registry; `Settings` is its frozen result; docs/configuration.md is generated
from it. Precedence: the engine's ``--model-loader-extra-config`` over ``FASTLOAD_*`` variables
over the defaults. An unknown or ill-typed key is an error that names the nearest valid one.
Nothing is ever written back to the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastload_common.errors import ConfigError
from fastload_common.units import GIB, MIB, TIB, format_size, parse_size

__all__ = ["ENV_PREFIX", "OPTIONS", "Option", "Settings", "environment", "load_settings"]

ENV_PREFIX = "FASTLOAD_"

# Larger ones are slips of the pen; the system's calls for memory and waits refuse them untyped.
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    Attributes:
        name: field of `Settings`; the variable is ``FASTLOAD_`` + upper case.
        unit: ``bytes``, ``s``, ``count``, ``path``, ``flag``, ``choice``, ``patterns``.
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


OPTIONS: tuple[Option, ...] = (
    Option(
        "concurrency",
        "count",
        32,
        "Requests in flight for one process. More hides more latency; each takes a connection.",
        minimum=1,
        maximum=4096,
    ),
    Option(
        "chunk_bytes",
        "bytes",
        8 * MIB,
        "Size of one ranged request. Larger hides the first byte better, smaller spreads better.",
        minimum=64 * 1024,
        maximum=4 * GIB,
    ),
    Option(
        "memory_bytes",
        "bytes",
        None,
        "Host memory for staging in one process. Default: concurrency x chunk_bytes + 25 %, at "
        "most a quarter of the smallest cgroup limit, divided among the ranks of the node.",
        minimum=1 * MIB,
        maximum=16 * TIB,
    ),
    Option(
        "merge_gap_bytes",
        "bytes",
        1 * MIB,
        "Needed ranges closer than this become one request; the bytes between are read for nothing "
        "and reported as such.",
        maximum=1 * TIB,
    ),
    Option(
        "max_attempts",
        "count",
        10,
        "Attempts for one range before its error ends the load.",
        minimum=1,
        maximum=1000,
    ),
    Option(
        "connect_timeout_s",
        "s",
        5.0,
        "Longest wait for a connection.",
        minimum=0.001,
        maximum=_DAY_S,
    ),
    Option(
        "read_timeout_s",
        "s",
        20.0,
        "Longest silence of a connection before the range is asked again on a new one.",
        minimum=0.001,
        maximum=_DAY_S,
    ),
    Option(
        "deadline_s",
        "s",
        None,
        "Longest duration of one load as a whole; unset means no limit.",
        minimum=0.001,
        maximum=7 * _DAY_S,
    ),
    Option(
        "trace",
        "choice",
        "lazy",
        "lazy: record what load_weights copies and read only that. eager: read every tensor whole, "
        "in order (for finding faults).",
        choices=("lazy", "eager"),
    ),
    Option(
        "verify",
        "choice",
        "off",
        "Compare objects with the CRC that the store keeps of them. covered: those that this load "
        "reads completely. full: the rest of the others is read as well, only for that.",
        choices=("off", "covered", "full"),
    ),
    Option(
        "anonymous",
        "flag",
        False,
        "Send unsigned requests (public buckets). Credentials are then not looked for.",
    ),
    Option(
        "cache_dir",
        "path",
        None,
        "Directory for configuration and tokenizer files (never weights). Default: "
        "$XDG_CACHE_HOME/fastload, else ~/.cache/fastload, else a directory under $TMPDIR.",
    ),
    Option(
        "cache_max_bytes",
        "bytes",
        2 * GIB,
        "Bound of cache_dir; the least recently used entries go first.",
        maximum=1024 * TIB,
    ),
    Option(
        "ignore_patterns",
        "patterns",
        ("original/**", "metal/**", ".git/**", ".cache/**"),
        "Objects never fetched, as comma-separated globs relative to the model's root.",
    ),
    Option("report", "path", None, "Append the report of each load to this file, as JSON lines."),
    Option(
        "progress",
        "choice",
        "auto",
        "Progress display: bar on a terminal, line every 10 s elsewhere (auto), or one of them.",
        choices=("auto", "bar", "lines", "off"),
    ),
)

# Kubernetes tells every pod of the Services around it: one that is called fastload, or
# fastload-something, would otherwise keep the engine from starting.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$"
)

_BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one process. Plain data: safe to pickle, holds no secret.

    Memory: at most ``memory_bytes`` of staging when set; otherwise
    ``1.25 * concurrency * chunk_bytes``, bounded by the smallest cgroup limit.
    """

    concurrency: int = _BY_NAME["concurrency"].default
    chunk_bytes: int = _BY_NAME["chunk_bytes"].default
    memory_bytes: int | None = _BY_NAME["memory_bytes"].default
    merge_gap_bytes: int = _BY_NAME["merge_gap_bytes"].default
    max_attempts: int = _BY_NAME["max_attempts"].default
    connect_timeout_s: float = _BY_NAME["connect_timeout_s"].default
    read_timeout_s: float = _BY_NAME["read_timeout_s"].default
    deadline_s: float | None = _BY_NAME["deadline_s"].default
    trace: str = _BY_NAME["trace"].default
    verify: str = _BY_NAME["verify"].default
    anonymous: bool = _BY_NAME["anonymous"].default
    cache_dir: Path | None = _BY_NAME["cache_dir"].default
    cache_max_bytes: int = _BY_NAME["cache_max_bytes"].default
    ignore_patterns: tuple[str, ...] = _BY_NAME["ignore_patterns"].default
    report: Path | None = _BY_NAME["report"].default
    progress: str = _BY_NAME["progress"].default

    def __post_init__(self) -> None:
        for option in OPTIONS:
            _check(option, getattr(self, option.name), shown=option.name)
        if self.memory_bytes is not None and self.memory_bytes < self.chunk_bytes:
            raise ConfigError(
                f"memory_bytes ({self.memory_bytes}) is smaller than chunk_bytes "
                f"({self.chunk_bytes})",
                hint="raise FASTLOAD_MEMORY_BYTES or lower FASTLOAD_CHUNK_BYTES",
            )

    def changed(self) -> dict[str, Any]:
        """The settings that are not at their default, for one log line per process."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != _BY_NAME[f.name].default
        }


def environment() -> Mapping[str, str]:
    """The process's environment, for the few callers that must pass it on (read only)."""
    return os.environ


def load_settings(
    extra_config: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    extra_name: str = "model-loader-extra-config",
) -> Settings:
    """Read the settings of this process.

    Args:
        extra_config: the engine's ``--model-loader-extra-config``; wins over the environment.
        environ: variables to read instead of `os.environ` (tests).
        extra_name: what messages call ``extra_config``.

    Raises:
        ConfigError: unknown key, ill-typed or out-of-range value, or two that contradict.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or _SERVICE_LINK.search(variable):
            continue
        option = _find(variable[len(ENV_PREFIX) :].lower(), shown=variable, prefix=ENV_PREFIX)
        if text.strip() != "":
            values[option.name] = _parse(option, text, shown=variable)
    for key, value in (extra_config or {}).items():
        option = _find(key, shown=f"{extra_name} key {key!r}", prefix="")
        values[option.name] = _parse(option, value, shown=f"{extra_name} {key!r}")
    return Settings(**values)


def _find(name: Any, *, shown: str, prefix: str) -> Option:
    option = _BY_NAME.get(name) if isinstance(name, str) else None
    if option is not None:
        return option
    names = [option.variable if prefix else option.name for option in OPTIONS]
    wanted = prefix + name.upper() if prefix else str(name)
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"unknown setting {shown}", hint=f"{hint}valid: {', '.join(names)}")


def _parse(option: Option, value: Any, *, shown: str) -> Any:
    try:
        parsed = _convert(option, value)
    except ConfigError as error:
        raise ConfigError(f"{shown}: {error.what}", hint=error.hint) from None
    except (TypeError, ValueError, OverflowError):
        raise _unexpected(option, value, shown) from None
    _check(option, parsed, shown=shown)
    return parsed


def _check(option: Option, value: Any, *, shown: str) -> None:
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
        unit = " s" if option.unit == "s" else ""
        text = format_size(bound) if option.unit == "bytes" else f"{bound:g}{unit}"
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
_NUMBERS = ("bytes", "s", "count")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "bytes": int,
    "s": (int, float),
    "count": int,
    "path": Path,
    "flag": bool,
    "choice": str,
    "patterns": tuple,
}
_EXPECTED = {
    "bytes": "a size such as 16MiB",
    "s": "a number of seconds",
    "count": "a whole number",
    "path": "a path",
    "flag": "true or false",
    "choice": "one of the choices",
    "patterns": "comma-separated globs",
}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True}
_FLAGS |= {"0": False, "false": False, "no": False, "off": False}


def _convert(option: Option, value: Any) -> Any:
    if value is None:
        return option.default
    if option.unit == "bytes":
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
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise TypeError
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, str) or value.strip().lower() not in _FLAGS:
        raise ValueError
    return _FLAGS[value.strip().lower()]
