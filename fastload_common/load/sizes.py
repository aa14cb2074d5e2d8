"""How much of everything one load of one rank takes: memory, requests, bytes per second.

What is set counts for the node and is divided among its ranks; what is not set is chosen from the
model's size, the memory limit, the CPUs, the descriptors.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from fastload_common.config import Settings
from fastload_common.errors import OutOfBudgetError
from fastload_common.load.request import RankPlace
from fastload_common.staging.memory_limit import (
    MemoryBudget,
    ReadText,
    read_kernel_file,
    staging_budget,
)
from fastload_common.transfer.node_share import share_of
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.receiver_process import process_count
from fastload_common.transfer.sizing import (
    Connections,
    choose_chunk_bytes,
    choose_concurrency,
)
from fastload_common.units import GIB, KIB, MIB, format_size

__all__ = ["LoadSizes", "Machine", "choose_sizes"]

# Of requests in flight there may be more than slots would allow if each consumer were slow.
_SLACK = 1.25
_LARGEST_CHUNK_BYTES = 16 * MIB
# A receiver process has an interpreter, and for each connection a thread and a TLS state.
_RECEIVER_BYTES = 12 * MIB
_CONNECTION_BYTES = 64 * KIB
_LEAST_BURST_BYTES = 64 * KIB
# More in flight than this has never been of use to one process.
_MOST_MEMORY_BYTES = 4 * GIB
# What is fetched and not yet written to the node cache.
_BEHIND_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Machine:
    """What of the machine counts; tests make one up."""

    cpu_count: int
    descriptor_limit: int
    read_text: ReadText = read_kernel_file

    @classmethod
    def here(cls) -> Machine:
        """The machine as this process sees it: its CPU affinity, its limits."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
        return cls(len(os.sched_getaffinity(0)), descriptors)


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """What one rank may take.

    Attributes:
        memory_bytes: staging and receivers together.
        chunk_bytes: of one staging slot, and of the largest request.
        slots: staging slots.
        behind_slots: of these, those that the node cache may hold while it writes.
        start_concurrency, concurrency: requests in flight at first, and at most.
        max_bytes_per_s: that may be asked for; None for no cap.
        reason: of the memory, for the log.
    """

    memory_bytes: int
    chunk_bytes: int
    slots: int
    start_concurrency: int
    concurrency: int
    max_bytes_per_s: int | None
    reason: str
    behind_slots: int = 0

    @property
    def burst_bytes(self) -> int:
        """What may be asked for at once under the cap: a quarter of a second's worth."""
        if self.max_bytes_per_s is None:
            return self.chunk_bytes
        return min(self.chunk_bytes, max(_LEAST_BURST_BYTES, self.max_bytes_per_s // 4))

    def policy(self, settings: Settings) -> TransferPolicy:
        """How a load of these sizes asks."""
        return TransferPolicy(
            concurrency=self.concurrency,
            start_concurrency=self.start_concurrency,
            max_attempts=settings.max_attempts,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=settings.read_timeout_s,
            deadline_s=settings.deadline_s,
            max_bytes_per_s=self.max_bytes_per_s,
            burst_bytes=self.burst_bytes,
        )


def choose_sizes(
    settings: Settings,
    place: RankPlace,
    total_bytes: int,
    *,
    remote: bool = True,
    machine: Machine | None = None,
) -> LoadSizes:
    """Choose for one rank.

    Args:
        total_bytes: of the weights that may have to be fetched.
        remote: whether receiver processes will run, which take memory too.
        machine: default: this one.

    Raises:
        OutOfBudgetError: the memory of this rank holds no chunk.
    """
    machine = machine or Machine.here()
    rank, ranks = place.local_rank, place.local_world_size
    wished = _connections(settings, place, total_bytes, machine)
    largest_bytes = settings.chunk_bytes or _LARGEST_CHUNK_BYTES
    behind_bytes = min(_BEHIND_BYTES, total_bytes) if settings.node_cache and remote else 0
    wanted_bytes = int(wished.maximum * largest_bytes * _SLACK) + behind_bytes
    wanted_bytes += _receivers_bytes(wished.maximum, machine) if remote else 0
    budget = staging_budget(
        settings.memory_bytes,
        wanted_bytes=max(min(wanted_bytes, _MOST_MEMORY_BYTES), largest_bytes),
        local_rank=rank,
        local_world_size=ranks,
        read_text=machine.read_text,
    )
    most, staging_bytes = wished.maximum, budget.bytes
    if remote:
        # Where there is little memory there are fewer connections, so that at least half is left,
        # or a slot for each of them.
        most, staging_bytes = _beside_receivers(most, largest_bytes, budget.bytes, machine)
    chunk_bytes = settings.chunk_bytes or choose_chunk_bytes(
        total_bytes=max(total_bytes, 1),
        memory_bytes=staging_bytes,
        connections=min(wished.start, staging_bytes // MIB or 1),
    )
    slots = max(staging_bytes, min(chunk_bytes, budget.bytes)) // chunk_bytes
    if slots < 1:
        raise _too_small(budget, chunk_bytes)
    behind = min(slots // 4, behind_bytes // chunk_bytes)
    most = min(most, slots - behind)
    own_cap = None if (cap := settings.max_bytes_per_s) is None else share_of(cap, rank, ranks)
    start, why = min(wished.start, most), budget.reason
    return LoadSizes(budget.bytes, chunk_bytes, slots, start, most, own_cap, why, behind)


def _beside_receivers(
    most: int, slot_bytes: int, budget_bytes: int, machine: Machine
) -> tuple[int, int]:
    """How many connections there is memory for, and what of it is left for staging."""
    while True:
        own_bytes = _receivers_bytes(most, machine)
        if own_bytes + most * slot_bytes <= budget_bytes or own_bytes <= budget_bytes // 2:
            return most, budget_bytes - own_bytes
        if most == 1:
            return 1, budget_bytes - budget_bytes // 2
        most = most * 3 // 4


def _receivers_bytes(connections: int, machine: Machine) -> int:
    """What receiver processes for so many connections take themselves."""
    count = process_count(connections, machine.cpu_count)
    return count * _RECEIVER_BYTES + connections * _CONNECTION_BYTES


def _too_small(budget: MemoryBudget, chunk_bytes: int) -> OutOfBudgetError:
    return OutOfBudgetError(
        f"staging may take {format_size(budget.bytes)} ({budget.reason}): less than one chunk of "
        f"{format_size(chunk_bytes)}",
        hint="lower FASTLOAD_CHUNK_BYTES, raise the memory limit, or set FASTLOAD_MEMORY_BYTES",
    )


def _connections(
    settings: Settings, place: RankPlace, total_bytes: int, machine: Machine
) -> Connections:
    """Requests in flight, were there memory for all of them."""
    if settings.concurrency is not None:
        own = share_of(settings.concurrency, place.local_rank, place.local_world_size)
        return Connections(own, own)
    return choose_concurrency(
        cpu_count=machine.cpu_count,
        descriptor_limit=machine.descriptor_limit,
        ranks=place.local_world_size,
        slots=1 << 20,
        remaining_bytes=total_bytes,
    )
