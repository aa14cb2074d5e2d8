"""What a failed attempt means, and how its error is told."""

from __future__ import annotations

from fastload_common.errors import SourceError, SourceUnavailableError
from fastload_common.transfer.parts import Part, Racer

__all__ = ["explained", "is_throttling", "slow_error"]

_BUSY = (429, 503)
_BUSY_CODES = ("SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException")


def is_throttling(error: SourceError) -> bool:
    """Whether the store asks for fewer requests."""
    if "proxy" in error.fields:
        return False  # it never came to the store
    return error.fields.get("status") in _BUSY or error.fields.get("code") in _BUSY_CODES


def slow_error(racer: Racer) -> SourceUnavailableError:
    """Stands for what an attempt that we ended ourselves has raised."""
    return SourceUnavailableError(
        f"the request was ended: {racer.killed}",
        hint="the store or the network is slow",
        uri=racer.part.chunk.chunk.object_id.uri,
        range=str(racer.part.range_from(racer.base_bytes)),
    )


def explained(error: BaseException, part: Part) -> BaseException:
    """The error that ends a load, with how far its range had come."""
    if isinstance(error, SourceError):
        error.fields.setdefault("attempts", part.attempts)
        error.add_note(
            f"while fetching {part.range_from(0)} of {part.chunk.chunk.object_id.uri}: "
            f"{part.done_bytes} of {part.size_bytes} bytes had arrived after {part.attempts} "
            "attempts"
        )
    return error
