"""One line of ``fastload doctor``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from fastload_common.errors import FastloadError

__all__ = ["Check", "Status"]

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it stands, what was found, and what to do unless it is ok."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    @classmethod
    def from_error(cls, name: str, error: FastloadError) -> Check:
        """A failed check, from the error that told of it."""
        facts = ", ".join(f"{key}={value}" for key, value in error.fields.items())
        found = f"{type(error).__name__}: {error.what}" + (f" [{facts}]" if facts else "")
        return cls(name, "fail", found, error.hint)

    def as_dict(self) -> dict[str, str]:
        """Plain data for ``--json``."""
        return asdict(self)
