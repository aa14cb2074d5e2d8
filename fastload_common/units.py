"""Sizes in bytes: constants, parsing, formatting. Knows nothing else."""

from __future__ import annotations

import re

from fastload_common.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kb": 1000,
    "kib": KIB,
    "m": MIB,
    "mb": 1000**2,
    "mib": MIB,
    "g": GIB,
    "gb": 1000**3,
    "gib": GIB,
    "t": TIB,
    "tb": 1000**4,
    "tib": TIB,
}
# No size has more digits; with thousands of them Python's own conversions fail.
_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([a-zA-Z]{0,3})\s*")
_SHOWN_CHARACTERS = 100


def even_share(total: int, number: int, count: int) -> int:
    """What the ``number``-th of ``count`` gets of a total, from 0.

    The shares of all add up to the total exactly; what cannot be divided goes to the first ones.
    """
    return total // count + (number < total % count)


def parse_size(text: str | int) -> int:
    """Parse ``16777216``, ``"16MiB"``, ``"1.5 GiB"`` or ``"64m"`` into bytes.

    ``k``, ``m``, ``g``, ``t`` alone mean powers of 1024, as in Kubernetes' ``Mi`` and in dd;
    ``kb``, ``mb`` ... mean powers of 1000.

    Raises:
        ConfigError: if it is not a size, or negative, or not a whole number of bytes.
    """
    if isinstance(text, bool):
        raise ConfigError(f"expected a size in bytes, got {text!r}", hint="write e.g. 16MiB")
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"expected a size in bytes, got {text}", hint="write e.g. 16MiB")
        return text
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    # Kubernetes writes Ki, Mi, Gi.
    if unit not in _FACTORS and f"{unit}b" in _FACTORS:
        unit = f"{unit}b"
    if match is None or unit not in _FACTORS:
        got = repr(text[:_SHOWN_CHARACTERS]) + ("..." if len(text) > _SHOWN_CHARACTERS else "")
        raise ConfigError(f"expected a size in bytes, got {got}", hint="write e.g. 16MiB")
    size_bytes = float(match.group(1)) * _FACTORS[unit]
    if "." not in match.group(1):
        return int(match.group(1)) * _FACTORS[unit]
    return round(size_bytes)


def format_size(size_bytes: float) -> str:
    """Format bytes for a person: ``512 B``, ``1.5 MiB``, ``86.5 GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
