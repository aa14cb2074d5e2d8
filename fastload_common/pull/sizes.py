"""How much memory the parts of a pull take, at any setting: pure arithmetic.

A pull stays below 256 MiB: the interpreter and what it imports take about 50, the transfer 128,
unpackers' pieces 24 and zstd's windows 40 at most. Settings that would take more get smaller
requests or smaller pieces, not more memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastload_common.config import Settings
from fastload_common.errors import OutOfBudgetError
from fastload_common.staging.memory_limit import ReadText, read_kernel_file, staging_budget
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.receiver_process import process_count
from fastload_common.transfer.sizing import Connections, choose_concurrency
from fastload_common.units import KIB, MIB, format_size

__all__ = ["MOST_UNPACKS", "WINDOWS_BYTES", "PullSizes", "choose_pull_sizes"]

# Staging and receivers; the unpackers' pieces and windows are beside it.
_TRANSFER_BYTES = 128 * MIB
_MOST_CONNECTIONS = 48
_RECEIVER_BYTES = 12 * MIB
_CONNECTION_BYTES = 64 * KIB
_SLACK = 1.25
_SPARE_DESCRIPTORS = 64
_LEAST_SLOT_BYTES = 64 * KIB
# A registry looks a blob up for each request, which costs it as much as half a MiB of the body.
_USUAL_SLOT_BYTES = 4 * MIB
# Each connection should get so many of them, or the last ones decide the time.
_SLOTS_PER_CONNECTION = 2

MOST_UNPACKS = 32
_PIECES_BYTES = 24 * MIB
# Of each unpacker: what it reads and what comes out, in its hands and on the way to the digests.
_PIECES_EACH = 10
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 32 * KIB, 512 * KIB
WINDOWS_BYTES = 40 * MIB
"""Of all zstd windows together."""


@dataclass(frozen=True, slots=True)
class PullSizes:
    """What one pull may take.

    Attributes:
        connections: requests in flight.
        start_connections: of these, at the beginning.
        slot_bytes: the largest request.
        slots: of staging memory.
        unpacks: layers at once.
        piece_bytes: what an unpacker reads and writes at once.
    """

    connections: int
    start_connections: int
    slot_bytes: int
    slots: int
    unpacks: int
    piece_bytes: int

    def policy(self, settings: Settings) -> TransferPolicy:
        """How the transfer asks."""
        cap = settings.max_bytes_per_s
        burst_bytes = self.slot_bytes
        if cap is not None:
            burst_bytes = min(self.slot_bytes, max(_LEAST_SLOT_BYTES, cap // 4))
        return TransferPolicy(
            concurrency=self.connections,
            start_concurrency=self.start_connections,
            max_attempts=settings.max_attempts,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
            deadline_s=settings.deadline_s,
            max_bytes_per_s=cap,
            burst_bytes=burst_bytes,
        )


def choose_pull_sizes(
    settings: Settings,
    total_bytes: int,
    *,
    cpu_count: int,
    descriptor_limit: int,
    remote: bool,
    node_connections: int | None = None,
    read_text: ReadText = read_kernel_file,
) -> PullSizes:
    """Choose for one pull.

    Args:
        total_bytes: to be fetched.
        remote: whether receiver processes will run, which take memory too.
        node_connections: what this pull has got of the node's connections; None: no bound.

    Raises:
        OutOfBudgetError: the memory holds no request.
    """
    budget = staging_budget(
        settings.memory_bytes, wanted_bytes=_TRANSFER_BYTES, read_text=read_text
    )
    budget_bytes = min(budget.bytes, _TRANSFER_BYTES)
    receivers = _Receivers(cpu_count if remote else None)
    wished = _connections(settings, total_bytes, cpu_count, descriptor_limit)
    most = min(wished.maximum, node_connections or wished.maximum)
    most = receivers.affordable(most, budget_bytes)
    slot_bytes = settings.concurrent_download_chunk_size
    if slot_bytes is None:
        share_bytes = total_bytes // (min(wished.start, most) * _SLOTS_PER_CONNECTION)
        slot_bytes = min(_USUAL_SLOT_BYTES, max(share_bytes // MIB, 1) * MIB)
    least = most
    if settings.max_concurrent_downloads_per_image is None:
        # Fewer connections are better than tiny requests, and have fewer receivers.
        most = min(most, max(8, int(budget_bytes / (slot_bytes * _SLACK))))
        least = min(most, 8)
    staging_bytes = budget_bytes - min(receivers.size_bytes(most), budget_bytes // 2)
    slot_bytes = max(_LEAST_SLOT_BYTES, min(slot_bytes, int(staging_bytes / (least * _SLACK))))
    slots = staging_bytes // slot_bytes
    if slots < 1:
        raise OutOfBudgetError(
            f"a pull may take {format_size(budget_bytes)} for staging ({budget.reason}): less "
            f"than one request of {format_size(slot_bytes)}",
            hint="raise the memory limit, or set FASTLOAD_MEMORY_BYTES",
        )
    most = max(1, min(most, int(slots / _SLACK)))
    unpacks, piece_bytes = _unpackers(settings, cpu_count)
    return PullSizes(most, min(wished.start, most), slot_bytes, slots, unpacks, piece_bytes)


def _connections(
    settings: Settings, total_bytes: int, cpu_count: int, descriptor_limit: int
) -> Connections:
    """Requests in flight, were there memory for all of them."""
    set_connections = settings.max_concurrent_downloads_per_image
    if set_connections is not None:
        own = min(set_connections, max(1, descriptor_limit - _SPARE_DESCRIPTORS))
        return Connections(own, own)
    wished = choose_concurrency(
        cpu_count=cpu_count,
        descriptor_limit=descriptor_limit,
        ranks=1,
        slots=_MOST_CONNECTIONS,
        remaining_bytes=total_bytes,
    )
    return Connections(min(wished.start, wished.maximum), wished.maximum)


def _unpackers(settings: Settings, cpu_count: int) -> tuple[int, int]:
    """How many, and the bytes of their pieces."""
    unpacks = settings.max_concurrent_unpacks_per_image or min(max(cpu_count, 2), 4)
    unpacks = min(unpacks, MOST_UNPACKS)
    piece_bytes = _PIECES_BYTES // unpacks // _PIECES_EACH // KIB * KIB
    return unpacks, min(max(piece_bytes, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class _Receivers:
    """What receiver processes take.

    Attributes:
        cpu_count: None: there are none.
    """

    cpu_count: int | None

    def size_bytes(self, connections: int) -> int:
        if self.cpu_count is None:
            return 0
        count = process_count(connections, self.cpu_count)
        return count * _RECEIVER_BYTES + connections * _CONNECTION_BYTES

    def affordable(self, connections: int, budget_bytes: int) -> int:
        """So many connections that half of the memory is left for staging."""
        while connections > 1 and self.size_bytes(connections) > budget_bytes // 2:
            connections = connections * 3 // 4
        return connections
