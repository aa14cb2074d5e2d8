"""How many requests, and how large: chosen from what is known, adapted to what is seen. Pure.

Connections that fill a link: ``link / (size / (first_byte + size / rate_of_connection))``, all
in bytes and seconds. With 8 MiB, 50 ms and 90 MB/s each connection gives 59 MB/s; 16 MiB give 71.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastload_common.transfer.node_share import share_of
from fastload_common.transfer.observed import MIN_SAMPLES, Observed
from fastload_common.units import KIB, MIB

__all__ = [
    "Connections",
    "Ramp",
    "choose_chunk_bytes",
    "choose_concurrency",
    "part_bytes",
]

# A node begins with two for each CPU: 32 of 59 MB/s fill 15 Gb/s, and a machine of 128 CPUs has a
# link of 100 Gb/s. Where that is too many, they share the link, which costs nothing.
_START_PER_CPU = 2
_LEAST_START, _MOST_START = 32, 128
# A rank of many begins with at least so many.
_LEAST_RANK_START = 8
# One core receives about 0.7 GiB/s of TLS, which is eight connections of 90 MB/s: twice that.
_CONNECTIONS_PER_CPU = 16
# 512 connections of 59 MB/s fill more than 200 Gb/s; stores see more as an attack.
_NODE_LEAST, _NODE_MOST = 64, 512
# What an engine has open beside the load's connections.
_SPARE_DESCRIPTORS = 64
# Less than this is not worth a connection of its own.
_WORTH_A_CONNECTION_BYTES = 1 * MIB

_LEAST_CHUNK_BYTES = 1 * MIB
_MOST_CHUNK_BYTES = 16 * MIB
# Slots that wait for the consumer, or hold a hedge, while all connections are in use.
_SLACK = 1.25
# Each connection should get so many chunks, or the last ones decide the time.
_CHUNKS_PER_CONNECTION = 8

_PART_STEP_BYTES = 64 * KIB
_LEAST_PART_BYTES = 256 * KIB
_UNKNOWN_PART_BYTES = 1 * MIB
# What a request takes of our own, in two processes: 1 ms of CPU time, and as much of waiting.
_REQUEST_S = 0.002
# Near the end each connection gets so many more parts.
_PARTS_PER_CONNECTION = 2
# Different sizes of the first requests, from half a chunk on.
_STAGGER = 8


@dataclass(frozen=True, slots=True)
class Connections:
    """How many requests to begin with, and how many at most."""

    start: int
    maximum: int


def choose_concurrency(
    *, cpu_count: int, descriptor_limit: int, ranks: int, slots: int, remaining_bytes: int
) -> Connections:
    """How many requests one rank may have in flight.

    Args:
        cpu_count: of the node.
        descriptor_limit: open files that one process may have.
        ranks: that load on this node at the same time; each gets its part.
        slots: of staging memory, since a request needs one.
        remaining_bytes: to be fetched.
    """
    node = min(max(_CONNECTIONS_PER_CPU * cpu_count, _NODE_LEAST), _NODE_MOST)
    ranks = max(1, ranks)
    useful = max(1, -(-remaining_bytes // _WORTH_A_CONNECTION_BYTES))
    maximum = max(
        1,
        min(
            share_of(node, ranks - 1, ranks),
            descriptor_limit - _SPARE_DESCRIPTORS,
            slots,
            useful,
        ),
    )
    node_start = min(max(_START_PER_CPU * cpu_count, _LEAST_START), _MOST_START)
    start = max(node_start // ranks, _LEAST_RANK_START)
    return Connections(start=min(start, maximum), maximum=maximum)


def choose_chunk_bytes(*, total_bytes: int, memory_bytes: int, connections: int) -> int:
    """The size of a staging slot, and of the largest request: a power of two, 1 to 16 MiB.

    Larger hides the first byte better; smaller spreads better and takes less memory.

    Args:
        total_bytes: to be fetched.
        memory_bytes: of staging.
        connections: that are to be in use at once.
    """
    connections = max(1, connections)
    most_bytes = min(
        memory_bytes / (connections * _SLACK),
        total_bytes / (connections * _CHUNKS_PER_CONNECTION),
        _MOST_CHUNK_BYTES,
    )
    doublings = int(math.log2(max(most_bytes, 1) / _LEAST_CHUNK_BYTES))
    return _LEAST_CHUNK_BYTES << max(0, doublings)


def part_bytes(
    *, chunk_bytes: int, remaining_bytes: int, connections: int, observed: Observed
) -> int:
    """The size of one request within a chunk: a multiple of 64 KiB, at most the chunk.

    The whole chunk in the middle of a load. Near the end smaller, so that all connections finish
    together, but never so small that the body takes less time than what comes before it.

    Args:
        chunk_bytes: of the staging slot.
        remaining_bytes: not yet asked for, this chunk included.
        connections: in use.
        observed: for the time to the first byte and the rate of a connection.
    """
    wanted_bytes = remaining_bytes // (max(1, connections) * _PARTS_PER_CONNECTION)
    if wanted_bytes >= chunk_bytes:
        if observed.count >= MIN_SAMPLES:
            return chunk_bytes
        # Requests of one size that begin together end together, and the link idles for a first
        # byte each time: the first ones get sizes of their own.
        turn = remaining_bytes // chunk_bytes % _STAGGER
        wanted_bytes = chunk_bytes * (_STAGGER + turn) // (2 * _STAGGER)
    size_bytes = max(wanted_bytes, _least_part_bytes(observed), _LEAST_PART_BYTES)
    size_bytes = -(-size_bytes // _PART_STEP_BYTES) * _PART_STEP_BYTES
    return min(size_bytes, chunk_bytes)


def _least_part_bytes(observed: Observed) -> int:
    first_byte_s = observed.first_byte_s(50)
    bytes_per_s = observed.bytes_per_s_of_connection
    if first_byte_s is None or bytes_per_s is None:
        return _UNKNOWN_PART_BYTES
    return int(min((first_byte_s + _REQUEST_S) * bytes_per_s, _MOST_CHUNK_BYTES))


class Ramp:
    """How many requests in flight: grows while more of them bring more bytes.

    Works in epochs. One that was measured with all connections in use is compared with the last:
    if half more connections brought at least 5 % more, half more are tried; if not, the step is
    taken back, and tried again only after a while that doubles each time. So under a link
    that is full the number stays where the link became full.

    Args:
        start: requests in flight at first.
        maximum: never more.
    """

    GROWTH = 1.5
    LEAST_GAIN = 0.10
    """More bytes for more connections, as shares. On a link that is not full it would be 1."""
    EPOCH_S = 0.4
    FIRST_HOLD_S = 4.0
    MOST_HOLD_S = 60.0
    IDLE_SHARE = 0.1
    """An epoch in which connections were idle for more of its time says nothing."""

    def __init__(self, start: int, maximum: int) -> None:
        self._maximum = max(1, maximum)
        self._target = min(max(1, start), self._maximum)
        self._before: tuple[int, float] | None = None
        self._hold_s = self.FIRST_HOLD_S
        self._held_until_s = -math.inf
        self._settling = True
        self._begin_s: float | None = None
        self._busy_s: float | None = None
        self._was_idle = False
        self._idle_s = 0.0
        self._requests = 0
        self._bytes = 0

    def __repr__(self) -> str:
        return f"Ramp({self._target} of {self._maximum})"

    @property
    def target(self) -> int:
        """Requests to keep in flight."""
        return self._target

    def busy(self, now_s: float, in_flight: int) -> None:
        """So many are in flight from now on; call it whenever that changed."""
        if self._busy_s is not None and self._was_idle:
            self._idle_s += now_s - self._busy_s
        self._busy_s = now_s
        self._was_idle = in_flight < self._target * (1 - self.IDLE_SHARE)

    def received(self, now_s: float, size_bytes: int) -> None:
        """So many bytes have come, of one request or of a piece of one."""
        if self._begin_s is None:
            self._begin(now_s)
            return
        self._requests += 1
        self._bytes += size_bytes
        elapsed_s = now_s - self._begin_s
        if self._settling:
            # Requests begun before the step must end first.
            if elapsed_s >= self.EPOCH_S / 2 and self._requests >= self._target:
                self._settling = False
                self._begin(now_s)
            return
        if elapsed_s < self.EPOCH_S or self._requests < 2 * self._target:
            return
        if self._was_idle and self._busy_s is not None:
            self.busy(now_s, 0)
        if self._idle_s <= elapsed_s * self.IDLE_SHARE:
            self._compare(now_s, self._bytes / elapsed_s)
        self._begin(now_s)

    def _compare(self, now_s: float, bytes_per_s: float) -> None:
        before = self._before
        if before is not None:
            target, before_bytes_per_s = before
            self._before = None
            least_gain = self.LEAST_GAIN * (self._target / target - 1)
            if bytes_per_s < before_bytes_per_s * (1 + least_gain):
                self._target = target
                self._held_until_s = now_s + self._hold_s
                self._hold_s = min(self._hold_s * 2, self.MOST_HOLD_S)
                self._settling = True
                return
            self._hold_s = self.FIRST_HOLD_S
        if now_s < self._held_until_s or self._target >= self._maximum:
            return
        self._before = (self._target, bytes_per_s)
        self._target = min(self._maximum, math.ceil(self._target * self.GROWTH))
        self._settling = True

    def _begin(self, now_s: float) -> None:
        self._begin_s = now_s
        self._idle_s = 0.0
        self._requests = 0
        self._bytes = 0
        if self._busy_s is not None:
            self._busy_s = now_s
