"""How the ranks of one engine reach each other before they have met here."""

from __future__ import annotations

from typing import Protocol

__all__ = ["RankGroup"]


class RankGroup(Protocol):
    """All ranks that load one model together; given by the engine's adapter."""

    @property
    def rank(self) -> int:
        """This process, ``0 <= rank < size``."""
        ...

    @property
    def size(self) -> int: ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in the order of the ranks. Blocks until all have called it."""
        ...
