"""Parts of the engines' adapters, by name of the engine; nothing of an engine is named here."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastload_common.errors import ConfigError, EngineUnsupportedError

__all__ = ["load_part"]


def load_part(group: str, engine: str, part: str, instead: str) -> Any:
    """What an installed adapter offers under an entry-point group.

    Args:
        part: what it is, for the message.
        instead: what else to do where the engine is not there, for the hint.

    Raises:
        ConfigError: there is none of that name.
        EngineUnsupportedError: it cannot be imported.
    """
    points = {point.name: point for point in metadata.entry_points(group=group)}
    if engine not in points:
        raise ConfigError(
            f"no engine {engine!r}; there is {', '.join(sorted(points)) or 'none'}",
            hint=f"install the engine's adapter, {instead}",
        )
    try:
        return points[engine].load()
    except ImportError as error:
        raise EngineUnsupportedError(f"the {part} of {engine} is not there: {error}") from error
