"""What one rank may take of what its node has. Pure arithmetic."""

from __future__ import annotations

from fastload_common.units import even_share

__all__ = ["share_of"]


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
    return max(1, even_share(total, local_rank, local_world_size))
