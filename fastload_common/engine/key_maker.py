"""How an engine's adapter tells the factors of a command line, without starting the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["GROUP", "KeyMaker"]

GROUP = "fastload.key_makers"
"""Group of entry points: name of the engine -> a `KeyMaker`."""


class KeyMaker(Protocol):
    """An engine, as ``fastload cache key`` asks it."""

    def check(self) -> None:
        """Raise `EngineUnsupportedError` where the engine is not installed. Quick."""
        ...

    def factors(self, arguments: Sequence[str]) -> Mapping[str, Any]:
        """The factors that a server with this command line would use here, in its first replica.

        Imports the engine, which may print and may change this process's environment.

        Args:
            arguments: as they follow the engine's command; the model comes first.

        Raises:
            ConfigError: the engine refuses them.
            EngineUnsupportedError: another release of it is needed.
        """
        ...
