"""How long a gap is that costs as much to read over as a request costs. Pure.

A gap of ``g`` bytes takes its time on a connection and its CPU; a request of its own instead takes
a first byte's wait, and CPU whatever its size. They cost the same where

    g = latency * rate / connections_per_stream  +  request_cpu / cpu_per_byte

- ``latency * rate``: what the connection would have brought while it waits. But where there are
  more connections than the link can feed, another one uses the link meanwhile: with S connections
  for each stream that the link has room for, a wait costs a S-th of that.
- ``request_cpu / cpu_per_byte``: the bytes that the CPU of a request would have received.

Latency 30 ms and 90 MB/s make 0.5 MiB; 100 ms make 1.2 MiB; a local file 0.2 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastload_common.units import GIB, KIB, MIB

__all__ = ["LEAST_GAP_BYTES", "MOST_GAP_BYTES", "PathCost", "merge_gap_bytes", "observe"]

LEAST_GAP_BYTES = 64 * KIB
"""Reading on is always cheaper: half of a request's CPU, on the cheapest path."""
MOST_GAP_BYTES = 4 * MIB
"""A few outliers among few reads must not make a load read a model whole."""

# A load begins with 2 connections for each CPU, which fill a usual link with bodies alone, and may
# have 16 where the waits for first bytes leave room (`transfer.sizing`).
_CONNECTIONS_PER_STREAM = 8.0
# Of a request in the scheduler and the receiver, and of a received byte through TLS
# (`make bench`: 1.2 CPU seconds for each GiB).
_REQUEST_CPU_S = 0.0002
_CPU_S_PER_BYTE = 1.2 / GIB

# What S3 gives one connection within a region, where nothing better is known.
_USUAL_LATENCY_S = 0.03
_USUAL_BYTES_PER_S = 90e6
# Fewer reads say nothing; a short body says nothing of the rate.
_LEAST_READS = 3
_LARGE_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class PathCost:
    """What a request costs on the way to the objects of one load.

    Attributes:
        latency_s: until the first byte of a body.
        bytes_per_s: of one connection, from the first byte on.
        latency_reads, rate_reads: how many reads each was observed in; 0: it is the usual one.
    """

    latency_s: float = _USUAL_LATENCY_S
    bytes_per_s: float = _USUAL_BYTES_PER_S
    latency_reads: int = 0
    rate_reads: int = 0

    @property
    def gap_bytes(self) -> int:
        """The longest gap to read over."""
        return merge_gap_bytes(self.latency_s, self.bytes_per_s)


def merge_gap_bytes(
    latency_s: float,
    bytes_per_s_per_connection: float,
    *,
    connections_per_stream: float = _CONNECTIONS_PER_STREAM,
    request_cpu_s: float = _REQUEST_CPU_S,
    cpu_s_per_byte: float = _CPU_S_PER_BYTE,
) -> int:
    """The longest gap that costs no more than a request.

    Args:
        latency_s: from a request to its first byte, on an open connection.
        bytes_per_s_per_connection: from then on.
        connections_per_stream: connections for each one that the link can feed, at least 1.
        request_cpu_s: CPU of a request besides that of its bytes.
        cpu_s_per_byte: CPU of a received byte.

    Returns:
        Bytes, from `LEAST_GAP_BYTES` to `MOST_GAP_BYTES`.

    Raises:
        ValueError: a number is negative, or not one.
    """
    numbers = (latency_s, bytes_per_s_per_connection, request_cpu_s)
    if not all(number >= 0 for number in numbers):
        raise ValueError(f"latency, rate and CPU of a request are not negative: {numbers}")
    if not (connections_per_stream >= 1 and cpu_s_per_byte > 0):
        raise ValueError("connections for a stream are at least 1, and a byte costs CPU")
    waited_bytes = latency_s * bytes_per_s_per_connection / connections_per_stream
    gap_bytes = waited_bytes + request_cpu_s / cpu_s_per_byte
    if not gap_bytes < MOST_GAP_BYTES:  # also what is no number
        return MOST_GAP_BYTES
    return max(LEAST_GAP_BYTES, math.ceil(gap_bytes))


def observe(reads: Sequence[tuple[int, float]]) -> PathCost:
    """What the first small reads of a load (its index, its headers) say of the way.

    The latency is the first quartile of reads below 1 MiB: the slower ones opened a connection, or
    waited for one another. Only larger ones say something of the rate: the third quartile, since a
    new connection is slow at first. Of fewer than three reads nothing is concluded.

    Args:
        reads: bytes and seconds of each, from the request to its last byte.
    """
    small = sorted(seconds for size, seconds in reads if 0 < size < _LARGE_BYTES)
    usual = PathCost()
    latency_s, latency_reads = usual.latency_s, 0
    if len(small) >= _LEAST_READS:
        latency_s, latency_reads = max(small[len(small) // 4], 0.0), len(small)
    rates = sorted(
        size / (seconds - latency_s)
        for size, seconds in reads
        if size >= _LARGE_BYTES and seconds > latency_s
    )
    if len(rates) < _LEAST_READS:
        return PathCost(latency_s, usual.bytes_per_s, latency_reads, 0)
    return PathCost(latency_s, rates[len(rates) * 3 // 4], latency_reads, len(rates))
