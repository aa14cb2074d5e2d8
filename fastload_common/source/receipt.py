"""What a request cost. Alone, so that a process that only receives need not import more."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Receipt"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one successful request cost, for the report.

    Attributes:
        size_bytes: body bytes placed in the buffer.
        first_byte_s: seconds to the reply's head, opening a connection included if that was needed.
        total_s: seconds to the last byte.
        new_connection: whether a connection had to be opened for it.
    """

    size_bytes: int
    first_byte_s: float
    total_s: float
    new_connection: bool
