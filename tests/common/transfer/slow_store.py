"""A store and a link in virtual time, and a small scheduler that uses the real policies.

Bodies are fluid: at any time the link's rate is divided among the connections as evenly as their
own limits allow. Everything is decided by the seed, so a run can be repeated exactly.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fastload_common.transfer.hedging import (
    Crowd,
    Flight,
    HedgeBudget,
    RateMeter,
    SlowPolicy,
    Verdict,
)
from fastload_common.transfer.judging import JUDGE_EVERY_S
from fastload_common.transfer.observed import Observed
from fastload_common.transfer.sizing import Ramp, part_bytes
from fastload_common.units import KIB, MIB

__all__ = ["Fate", "Network", "Outcome", "Simulation"]

# A receiver tells of progress after each slice.
SLICE_BYTES = 256 * KIB
_NEVER = math.inf


@dataclass(frozen=True)
class Fate:
    """What becomes of one request: seconds to the head, the rate at most, where it stalls."""

    first_byte_s: float
    bytes_per_s: float
    stalls_at_bytes: float = _NEVER


@dataclass(frozen=True)
class Network:
    """Bytes per second and seconds; shares are of requests.

    Attributes:
        sigma: of a lognormal factor on the time to the first byte.
        link_at: (time, rate of the link from then on), in order.
    """

    first_byte_s: float = 0.03
    bytes_per_s: float = 90e6
    link_bytes_per_s: float = 500e6
    slow_share: float = 0.0
    slow_factor: float = 3.0
    stall_share: float = 0.0
    sigma: float = 0.0
    link_at: tuple[tuple[float, float], ...] = ()

    def fate(self, draw: random.Random, size_bytes: int) -> Fate:
        kind, where = draw.random(), draw.random()
        factor = draw.lognormvariate(0, self.sigma) if self.sigma else 1.0
        if kind < self.stall_share:
            stalls_at_bytes = 0.0 if where < 0.5 else (where - 0.5) * 2 * size_bytes
            return Fate(self.first_byte_s * factor, self.bytes_per_s, stalls_at_bytes)
        if kind < self.stall_share + self.slow_share:
            rate = self.bytes_per_s / self.slow_factor
            return Fate(self.first_byte_s * self.slow_factor * factor, rate)
        return Fate(self.first_byte_s * factor, self.bytes_per_s)

    def link(self, now_s: float) -> float:
        rate = self.link_bytes_per_s
        for since_s, changed in self.link_at:
            rate = changed if now_s >= since_s else rate
        return rate


@dataclass(eq=False)
class Request:
    """One attempt on the wire."""

    part: Part
    base_bytes: int
    size_bytes: int
    fate: Fate
    started_s: float
    is_hedge: bool
    fresh: bool
    has_head: bool = False
    received_bytes: float = 0.0
    seen_bytes: int = 0
    last_progress_s: float = 0.0
    rate: float = 0.0
    meter: RateMeter = field(default_factory=RateMeter)

    def head_s(self) -> float:
        return self.started_s + self.fate.first_byte_s

    def flight(self, now_s: float) -> Flight:
        return Flight(
            started_s=self.started_s,
            size_bytes=self.size_bytes,
            received_bytes=self.seen_bytes,
            first_byte_s=self.fate.first_byte_s if self.has_head else None,
            last_progress_s=self.last_progress_s,
            rate_bytes_per_s=self.meter.rate_bytes_per_s(now_s),
            hedged=len(self.part.requests) > 1,
            kills=self.part.kills,
        )


@dataclass(eq=False)
class Part:
    """One range; ``done_bytes`` from its start are there."""

    size_bytes: int
    done_bytes: int = 0
    fresh: bool = False
    kills: int = 0
    attempts: int = 0
    requests: list[Request] = field(default_factory=list)


@dataclass
class Outcome:
    """What a simulated load cost."""

    wall_s: float = 0.0
    sent_bytes: float = 0.0
    size_bytes: int = 0
    requests: int = 0
    hedges: int = 0
    kills: int = 0
    most_in_flight: int = 0
    most_attempts: int = 0
    hedged_at_s: list[float] = field(default_factory=list)
    killed_at_s: list[float] = field(default_factory=list)

    @property
    def extra_share(self) -> float:
        return self.sent_bytes / self.size_bytes - 1


class Simulation:
    """One load of ``size_bytes`` in chunks.

    Args:
        fate_of: overrides the network's dice: (number of the request, its size) -> fate or None.
        crowd: whether the judge sees the other attempts.
    """

    def __init__(
        self,
        network: Network,
        size_bytes: int,
        *,
        seed: int = 1,
        connections: int = 32,
        maximum: int | None = None,
        chunk_bytes: int = 8 * MIB,
        slow: SlowPolicy | None = None,
        hedges: HedgeBudget | None = None,
        fate_of: Callable[[int, int], Fate | None] = lambda number, size: None,
        limit_s: float = 300.0,
    ) -> None:
        self.network = network
        self.draw = random.Random(seed)
        self.slow = slow or SlowPolicy()
        self.budget = hedges or HedgeBudget()
        self.observed = Observed()
        self.crowd = Crowd()
        self.ramp = Ramp(connections, maximum or connections)
        self.out = Outcome(size_bytes=size_bytes)
        self.fate_of = fate_of
        self.limit_s = limit_s
        self.now_s = 0.0
        self.delivered_bytes = 0
        self.unasked_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.parts: deque[Part] = deque()
        self.running: list[Request] = []
        self._heads: list[tuple[float, int, Request]] = []
        self._ids = itertools.count()

    def run(self) -> Outcome:
        judge_s = JUDGE_EVERY_S
        while self.delivered_bytes < self.out.size_bytes:
            assert self.now_s < self.limit_s, f"hangs: {self.out}"
            self._fill()
            self._share_link()
            until_s = min(judge_s, self._next_s())
            self._flow(until_s - self.now_s)
            self.now_s = until_s
            self._arrive()
            if self.now_s >= judge_s:
                self._judge()
                judge_s = self.now_s + JUDGE_EVERY_S
        self.out.wall_s = self.now_s
        return self.out

    def _fill(self) -> None:
        while len(self.running) < self.ramp.target:
            if not self.parts:
                if not self.unasked_bytes:
                    break
                self._open_chunk()
            self._start(self.parts.popleft(), is_hedge=False)
        self.ramp.busy(self.now_s, len(self.running))
        self.out.most_in_flight = max(self.out.most_in_flight, len(self.running))

    def _open_chunk(self) -> None:
        chunk_bytes = min(self.chunk_bytes, self.unasked_bytes)
        step_bytes = part_bytes(
            chunk_bytes=chunk_bytes,
            remaining_bytes=self.unasked_bytes,
            connections=self.ramp.target,
            observed=self.observed,
        )
        self.unasked_bytes -= chunk_bytes
        for start in range(0, chunk_bytes, step_bytes):
            self.parts.append(Part(min(step_bytes, chunk_bytes - start)))

    def _start(self, part: Part, *, is_hedge: bool) -> None:
        base_bytes = part.done_bytes
        if is_hedge:
            base_bytes += part.requests[0].seen_bytes
        size_bytes = part.size_bytes - base_bytes
        fate = self.fate_of(self.out.requests, size_bytes)
        fate = fate or self.network.fate(self.draw, size_bytes)
        fresh = is_hedge or part.fresh
        if fresh:
            connect_s = self.network.first_byte_s
            fate = Fate(fate.first_byte_s + connect_s, fate.bytes_per_s, fate.stalls_at_bytes)
        request = Request(part, base_bytes, size_bytes, fate, self.now_s, is_hedge, fresh)
        request.last_progress_s = self.now_s
        request.meter.add(self.now_s, 0)
        part.requests.append(request)
        part.attempts += 1
        self.out.most_attempts = max(self.out.most_attempts, part.attempts)
        self.running.append(request)
        self.out.requests += 1
        if fate.first_byte_s < _NEVER:
            heapq.heappush(self._heads, (request.head_s(), next(self._ids), request))

    def _share_link(self) -> None:
        """The link's rate among the bodies, as evenly as their own limits allow."""
        bodies = [r for r in self.running if r.has_head]
        for request in bodies:
            request.rate = 0.0
        flowing = [r for r in bodies if r.received_bytes < r.fate.stalls_at_bytes]
        flowing.sort(key=lambda request: request.fate.bytes_per_s)
        left = self.network.link(self.now_s)
        for place, request in enumerate(flowing):
            request.rate = min(request.fate.bytes_per_s, left / (len(flowing) - place))
            left -= request.rate

    def _next_s(self) -> float:
        times = [since_s for since_s, _ in self.network.link_at if since_s > self.now_s]
        if self._heads:
            times.append(self._heads[0][0])
        for request in self.running:
            if request.rate > 0:
                end = min(request.size_bytes, request.fate.stalls_at_bytes)
                times.append(self.now_s + (end - request.received_bytes) / request.rate)
        return max(self.now_s, min(times, default=_NEVER))

    def _flow(self, elapsed_s: float) -> None:
        for request in self.running:
            if request.rate <= 0:
                continue
            brought = request.rate * elapsed_s
            end = min(float(request.size_bytes), request.fate.stalls_at_bytes)
            if end - request.received_bytes - brought < 1e-3:
                brought = end - request.received_bytes
            request.received_bytes += brought
            self.out.sent_bytes += brought
            slices = int(request.received_bytes) // SLICE_BYTES * SLICE_BYTES
            if slices > request.seen_bytes:
                past_s = (request.received_bytes - slices) / request.rate
                request.seen_bytes = slices
                request.last_progress_s = self.now_s + elapsed_s - past_s
                request.meter.add(request.last_progress_s, slices)

    def _arrive(self) -> None:
        while self._heads and self._heads[0][0] <= self.now_s:
            request = heapq.heappop(self._heads)[2]
            if request in self.running:
                request.has_head = True
                request.last_progress_s = self.now_s
                request.meter.add(self.now_s, 0)
        for request in list(self.running):
            if request in self.running and request.received_bytes >= request.size_bytes:
                self._done(request)

    def _done(self, request: Request) -> None:
        part = request.part
        self.observed.add(
            first_byte_s=request.fate.first_byte_s,
            total_s=self.now_s - request.started_s,
            size_bytes=request.size_bytes,
            new_connection=request.fresh,
        )
        self.ramp.received(self.now_s, request.size_bytes)
        self.delivered_bytes += part.size_bytes
        for other in list(part.requests):
            self._end(other, won=other is request)

    def _end(self, request: Request, *, won: bool = False) -> None:
        self.running.remove(request)
        request.part.requests.remove(request)
        if request.is_hedge:
            self.budget.settle(request.size_bytes, 0 if won else int(request.received_bytes))

    def _judge(self) -> None:
        idle = not self.parts and not self.unasked_bytes
        idle = idle and len(self.running) < self.ramp.target
        flights = [(request, request.flight(self.now_s)) for request in self.running]
        self.crowd.look(self.now_s, (flight for _, flight in flights))
        for request, flight in flights:
            verdict = self.slow.judge(
                self.now_s, flight, self.observed, idle=idle, crowd=self.crowd
            )
            if verdict is Verdict.KILL:
                self._kill(request)
            elif verdict is Verdict.HEDGE and len(request.part.requests) == 1:
                missing_bytes = flight.size_bytes - flight.received_bytes
                if self.budget.try_take(missing_bytes, self.delivered_bytes):
                    self.out.hedges += 1
                    self.out.hedged_at_s.append(self.now_s)
                    self._start(request.part, is_hedge=True)

    def _kill(self, request: Request) -> None:
        part = request.part
        self.out.kills += 1
        part.kills += 1
        self.out.killed_at_s.append(self.now_s)
        self._end(request)
        if request.base_bytes <= part.done_bytes:
            part.done_bytes = max(part.done_bytes, request.base_bytes + int(request.received_bytes))
        if not part.requests:
            part.fresh = True
            self.parts.appendleft(part)
