"""What a failed attempt means, and how its error is told."""

from __future__ import annotations

from fastload_common.errors import DeadlineError, SourceError, SourceUnavailableError
from fastload_common.transfer.parts import Part, Racer
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.run import Run

__all__ = ["counts", "explained", "is_throttling", "late_error", "slow_error"]

# So many times a range may be asked again because we thought its request slow. Each time that
# takes twice as long, so that a store that is slow, and no more, answers one of them.
_FREE_KILLS = 4

_BUSY = (429, 503)
_BUSY_CODES = ("SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException")


def is_throttling(error: SourceError) -> bool:
    """Whether the store asks for fewer requests."""
    if "proxy" in error.fields:
        return False  # it never came to the store
    return error.fields.get("status") in _BUSY or error.fields.get("code") in _BUSY_CODES


def counts(racer: Racer, now_s: float, policy: TransferPolicy) -> bool:
    """Whether a failure without progress counts towards the range's attempts.

    Ending it may have been our choice: then only if its connection would have given up too, or we
    have had so many choices.
    """
    silent_s = now_s - racer.last_progress_s
    is_choice = bool(racer.killed) and silent_s < policy.read_timeout_s
    return not is_choice or racer.part.kills > _FREE_KILLS


def late_error(run: Run, delay_s: float, error: SourceError) -> DeadlineError | None:
    """The end of a load whose deadline comes before the next attempt; None: there is time."""
    remaining_s = run.remaining_s()
    if remaining_s is None or delay_s < remaining_s:
        return None
    # Waiting it out would change nothing.
    late = run.deadline_error()
    late.__cause__ = error
    return late


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
