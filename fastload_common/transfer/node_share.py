"""What one rank may take of what its node has. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NodeShare", "share_of"]


def share_of(total: int, local_rank: int, local_world_size: int) -> int:
    """This rank's part of a node's budget.

    The parts add up to the total exactly; what cannot be divided goes to the lower ranks. Where
    there is less than one for each, each gets 1, since none can work with nothing.

    Args:
        total: the node's budget; at least 1.
        local_rank: from 0 to ``local_world_size - 1``.
    """
    if total < 1 or not 0 <= local_rank < local_world_size:
        raise ValueError(f"rank {local_rank} of {local_world_size} wants a share of {total}")
    return max(1, total // local_world_size + (local_rank < total % local_world_size))


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One rank's part of its node's budgets.

    Attributes:
        connections: requests in flight at most.
        memory_bytes: of staging.
        bytes_per_s: that may be asked for; None for no cap.
    """

    connections: int
    memory_bytes: int
    bytes_per_s: int | None

    @classmethod
    def of(
        cls,
        local_rank: int,
        local_world_size: int,
        *,
        connections: int,
        memory_bytes: int,
        bytes_per_s: int | None,
    ) -> NodeShare:
        """The part of a rank; the keyword arguments are the node's budgets."""

        def part(total: int) -> int:
            return share_of(total, local_rank, local_world_size)

        return cls(
            connections=part(connections),
            memory_bytes=part(memory_bytes),
            bytes_per_s=None if bytes_per_s is None else part(bytes_per_s),
        )
