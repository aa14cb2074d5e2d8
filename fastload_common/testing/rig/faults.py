"""Which request meets which harm: faults, addressed by object, range, attempt, time and share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from random import Random
from typing import TypeVar

from fastload_common.ranges import ByteRange
from fastload_common.testing.rig.effects import (
    Close,
    Effect,
    Error,
    FirstByte,
    Garbage,
    Rate,
    Redirect,
    Reset,
    Short,
    Slower,
    Stall,
)
from fastload_common.testing.rig.log import LoggedRequest

__all__ = ["Fault", "Plan", "plan_reply"]

E = TypeVar("E", bound=Effect)


@dataclass(frozen=True, slots=True)
class Fault:
    """One harm and the requests that meet it. All conditions must hold.

    Attributes:
        effect: one of `effects`.
        name: glob of ``bucket/key`` (of ``bucket/prefix`` for listings); ``*`` matches slashes too.
        methods: of GET, HEAD, PUT, LIST.
        byte_range: the request asks for some of these bytes.
        attempts: numbers as in `LoggedRequest.attempt`, or a predicate; None: every one.
        from_s, until_s: seconds since the rig's start, in ``[from_s, until_s)``.
        share: this share of the requests that match otherwise.
        seed: of that choice and of drawn delays. The same request (object, range, attempt) is
            always treated alike, in whatever order requests come.
    """

    effect: Effect
    name: str = "*"
    methods: tuple[str, ...] = ("GET",)
    byte_range: ByteRange | None = None
    attempts: tuple[int, ...] | Callable[[int], bool] | None = None
    from_s: float = 0.0
    until_s: float = math.inf
    share: float = 1.0
    seed: int = 0

    def meets(self, request: LoggedRequest, since_start_s: float) -> bool:
        """Whether this request is harmed."""
        if request.kind not in self.methods or not self.from_s <= since_start_s < self.until_s:
            return False
        if not self._attempt_matches(request.attempt) or not fnmatchcase(request.name, self.name):
            return False
        if self.byte_range is not None and not request.overlaps(self.byte_range):
            return False
        return self.share >= 1 or self.random(request, "share").random() < self.share

    def random(self, request: LoggedRequest, purpose: str) -> Random:
        """A generator that depends on the request's identity only."""
        what = f"{request.kind} {request.name} {request.byte_range} {request.attempt}"
        return Random(f"{self.seed} {self.effect!r} {purpose} {what}")

    def _attempt_matches(self, attempt: int) -> bool:
        if self.attempts is None:
            return True
        return self.attempts(attempt) if callable(self.attempts) else attempt in self.attempts


@dataclass(frozen=True, slots=True)
class Plan:
    """All harm that one reply takes. Drawn delays are settled."""

    effects: tuple[Effect, ...] = ()

    def last(self, kind: type[E]) -> E | None:
        return next((e for e in reversed(self.effects) if isinstance(e, kind)), None)

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def answer(self) -> Error | Redirect | Garbage | None:
        """What is said instead of the object."""
        kinds = (Error, Redirect, Garbage)
        return next((effect for effect in self.effects if isinstance(effect, kinds)), None)

    @property
    def first_byte_s(self) -> float:
        wait = self.last(FirstByte)
        if wait is None:
            return 0.0
        if not isinstance(wait.seconds, float | int):
            raise TypeError("a delay that was not drawn")
        return wait.seconds * self._factor

    @property
    def bytes_per_s(self) -> float | None:
        rate = self.last(Rate)
        return None if rate is None else rate.bytes_per_s / self._factor

    def breaks(self, body_bytes: int) -> list[tuple[int, Stall | Reset | Short]]:
        """What happens in a body of this length, and after how many bytes; -1: before the head."""
        found: list[tuple[int, Stall | Reset | Short]] = []
        for effect in self.effects:
            if isinstance(effect, Stall | Reset | Short):
                offset = effect.offset(body_bytes)
                if offset is None or offset <= body_bytes:
                    found.append((-1 if offset is None else offset, effect))
        return sorted(found, key=lambda item: item[0])

    @property
    def farewell(self) -> bool:
        """Whether a TLS connection is closed in due form."""
        return all(e.close_notify for e in self.effects if isinstance(e, Close | Short))

    @property
    def _factor(self) -> float:
        return math.prod(slower.factor for slower in self.all(Slower))


def plan_reply(faults: Iterable[Fault], request: LoggedRequest, since_start_s: float) -> Plan:
    """All harm for this request, in the order of the faults."""
    effects: list[Effect] = []
    for fault in faults:
        if fault.meets(request, since_start_s):
            effect = fault.effect
            if isinstance(effect, FirstByte) and not isinstance(effect.seconds, float | int):
                drawn_s = effect.seconds.draw(fault.random(request, "delay"))
                effect = replace(effect, seconds=drawn_s)
            effects.append(effect)
    return Plan(tuple(effects))
