"""What an advice is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Note", "Phase", "Setting", "Store", "Value"]

Value = str | int | bool

Note = str
"""One sentence on what the numbers do not say, or what is unusual."""


class Store(StrEnum):
    """Where a model is, as it is called in sentences."""

    S3 = "S3"
    REGISTRY = "the registry"

    @property
    def place(self) -> str:
        """What holds the files there."""
        return "the bucket" if self is Store.S3 else str(self)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting and why it has that value.

    Attributes:
        name: as the program that reads it spells it: a variable, a flag, a key of a file.
        value: what to set; None: leave it unset, the reason says what happens then.
        why: one sentence.
    """

    name: str
    value: Value | None
    why: str


@dataclass(frozen=True, slots=True)
class Phase:
    """How long one part of a start should take.

    Attributes:
        name: what happens.
        seconds: expected; not a promise.
        formula: how that was reckoned, with its numbers.
        bound: what would have to be faster.
    """

    name: str
    seconds: float
    formula: str
    bound: str
