"""What the parts of a load need of the report: a way to say which phase they are in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

__all__ = ["NoPhases", "PhaseTimer"]


class PhaseTimer(Protocol):
    """Times phases by name; `load.report` has the real one."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a block as (part of) a phase; times add up."""
        ...


class NoPhases:
    """Times nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()
