"""Random lists of faults, the same for the same seed, and what a client may make of each.

Made for many short loads of small objects by a client whose read timeout is about 0.3 s: nothing
waits longer than that but what lasts until the client closes, and no delay of a reply that is good
otherwise comes near it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from fastload_common.ranges import ByteRange
from fastload_common.testing.rig.effects import (
    ACCESS_DENIED,
    EXPIRED_TOKEN,
    INTERNAL_ERROR,
    KMS_DISABLED,
    NO_SUCH_KEY,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Choice,
    Chunked,
    Close,
    ContentRange,
    Effect,
    Error,
    Etag,
    FirstByte,
    Garbage,
    IgnoreRange,
    Rate,
    Redirect,
    Reset,
    Short,
    Shorter,
    Slower,
    Stall,
    Status,
    Unframed,
)
from fastload_common.testing.rig.fault_json import dump_faults
from fastload_common.testing.rig.faults import Fault

__all__ = ["Outcome", "Storm", "random_faults"]

Outcome = Literal["bytes", "either", "error"]

_UNAVAILABLE = frozenset({"SourceUnavailableError", "DeadlineError"})
_MISMATCH = frozenset({"RangeMismatchError"})
_CHANGED = frozenset({"ObjectChangedError", "ObjectMissingError"})
_REFUSED = frozenset({"AccessDeniedError", "SourceError"})


@dataclass(frozen=True, slots=True)
class Storm:
    """One schedule of faults.

    Attributes:
        outcome: what a load of all objects may come to. ``bytes``: it must succeed. ``error``: it
            must fail. ``either``: some reply is wrong in a way that a client need not ask again
            for, or a permanent harm that a client's way of asking may miss.
        tries: so many tries of any range are enough for ``bytes``. A try that met a kept
            connection which the server had closed does not count.
        errors: names of the errors that it may end with; empty for ``bytes``.
    """

    seed: int
    faults: tuple[Fault, ...]
    outcome: Outcome
    tries: int
    errors: frozenset[str] = frozenset()

    @property
    def curable(self) -> bool:
        """Whether every fault passes by itself, so that all bytes must come."""
        return self.outcome == "bytes"

    def __str__(self) -> str:
        return f"storm {self.seed} ({self.outcome}): {dump_faults(self.faults)}"


def random_faults(
    seed: int,
    objects: Mapping[str, int],
    *,
    max_tries: int = 3,
    uncurable_share: float = 0.1,
    tls: bool = False,
) -> Storm:
    """A random schedule.

    Args:
        seed: the same one gives the same schedule.
        objects: ``bucket/key`` to size in bytes.
        max_tries: a client that tries each range so often outlives what passes; from 2 on.
        uncurable_share: of the schedules that hold a fault which may end the load.
        tls: whether connections use TLS, so that a farewell can be missing.
    """
    if max_tries < 2:
        raise ValueError(f"no fault is outlived with {max_tries} tries")
    random = Random(f"storm {seed}")
    faults = [
        _passing(random, objects, max_tries, tls) for _ in range(random.choice((1, 2, 3, 4, 6)))
    ]
    if random.random() < 0.4:
        faults.append(_weather(random, objects))
    if random.random() < 0.2:
        faults.append(_metadata_fault(random))
    outcome: Outcome = "bytes"
    errors: frozenset[str] = frozenset()
    if random.random() < uncurable_share:
        fault, outcome, errors = _uncurable(random, objects)
        faults.insert(random.randrange(len(faults) + 1), fault)
    settled = tuple(replace(fault, seed=random.randrange(2**32)) for fault in faults)
    return Storm(seed, settled, outcome, max_tries, errors)


def _passing(random: Random, objects: Mapping[str, int], max_tries: int, tls: bool) -> Fault:
    """A fault that no longer happens at the last try, or a good reply of unusual form."""
    name = random.choice([*objects, "*"])
    size = max(objects.values()) if name == "*" else objects[name]
    fault = Fault(Unframed(), name=name, share=random.choice((1.0, 1.0, 0.5, 0.2)))
    if random.random() < 0.3:
        fault = replace(fault, byte_range=_some_range(random, size))
    if random.random() < 0.2:
        return replace(fault, effect=random.choice(_unusual(random)))
    # A client asks again for what is missing, so the attempts of a range follow its tries.
    attempts = tuple(range(1, random.randrange(2, max_tries + 1)))
    until_s = random.choice((float("inf"), float("inf"), 0.2))
    kinds = _late(random) if random.random() < 0.25 else _breaking(random, tls)
    return replace(fault, effect=random.choice(kinds), attempts=attempts, until_s=until_s)


def _weather(random: Random, objects: Mapping[str, int]) -> Fault:
    """How fast all replies are. One of a schedule, so that delays do not add up."""
    size_bytes = max(objects.values())
    kinds: list[Effect] = [
        FirstByte(Choice((0.0, 0.005, 0.02, 0.08), (4, 3, 2, 1))),
        FirstByte(random.uniform(0.0, 0.05)),
        Rate(size_bytes * random.uniform(8.0, 40.0) + 1000.0),
    ]
    return Fault(random.choice(kinds))


def _unusual(random: Random) -> list[Effect]:
    return [
        Chunked(random.choice((7_000, 20_000, 64_000))),
        Unframed(),
        Close(announced=random.random() < 0.5),
        Status(200),
    ]


def _late(random: Random) -> list[Effect]:
    """Good replies that need patience."""
    return [
        Slower(random.uniform(1.0, 2.0)),
        Stall(after_share=random.random(), seconds=random.uniform(0.0, 0.1)),
        Stall(after_bytes=None, seconds=random.uniform(0.0, 0.1)),
    ]


def _breaking(random: Random, tls: bool) -> list[Effect]:
    """What ends an attempt without its bytes, and may be gone at the next one."""
    share = random.random()
    places: list[Callable[[type[Stall] | type[Reset] | type[Short]], Stall | Reset | Short]] = [
        lambda kind: kind(after_bytes=None),
        lambda kind: kind(after_bytes=0),
        lambda kind: kind(after_bytes=-1),
        lambda kind: kind(after_bytes=random.choice((1, 1000, 65_536))),
        lambda kind: kind(after_share=share),
        lambda kind: kind(after_share=share),
    ]
    found: list[Effect] = [random.choice(places)(kind) for kind in (Stall, Reset, Reset, Short)]
    found += [
        Short(after_share=share, close_notify=not tls),
        Unframed(close=False),
        Rate(random.choice((1, 2))),
        Garbage(),
        SLOW_DOWN,
        SLOW_DOWN,
        INTERNAL_ERROR,
        TOO_MANY_REQUESTS,
        Error(503, "SlowDown", retry_after_s=0),
        Error(503),
    ]
    return found


def _metadata_fault(random: Random) -> Fault:
    """Something about HEAD and listings, which passes."""
    effect = random.choice((FirstByte(0.03), SLOW_DOWN, INTERNAL_ERROR))
    return Fault(effect, methods=("HEAD", "LIST"), attempts=(1,))


def _uncurable(random: Random, objects: Mapping[str, int]) -> tuple[Fault, Outcome, frozenset[str]]:
    """A fault of one object that does not pass, or a reply that a client need not forgive."""
    name = random.choice(list(objects))
    kinds: list[tuple[Effect, Outcome, frozenset[str]]] = [
        (ACCESS_DENIED, "error", _REFUSED),
        (KMS_DISABLED, "error", _REFUSED),
        (EXPIRED_TOKEN, "error", _REFUSED),
        (NO_SUCH_KEY, "error", _CHANGED),
        (Error(412, "PreconditionFailed"), "error", _CHANGED),
        (Redirect(), "error", _REFUSED),
        (Etag(), "error", _CHANGED),
        (ContentRange(total_more_bytes=1), "error", _CHANGED),
        (ContentRange(shift_bytes=1), "error", _MISMATCH | _CHANGED),
        (Shorter(1), "error", _MISMATCH | _UNAVAILABLE),
        # A client that asks for the whole object gets what it asked for.
        (IgnoreRange(), "either", _MISMATCH | _CHANGED),
        (SLOW_DOWN, "error", _UNAVAILABLE),
        (Garbage(), "error", _UNAVAILABLE),
        (Stall(after_bytes=None), "error", _UNAVAILABLE),
        (Stall(after_bytes=0), "error", _UNAVAILABLE),
        (Reset(after_bytes=0), "error", _UNAVAILABLE),
        (Short(after_bytes=0), "error", _UNAVAILABLE),
    ]
    effect, outcome, errors = random.choice(kinds)
    fault = Fault(effect, name=name)
    # What lies after the last byte of a shorter body may be asked for alone, and be good.
    if random.random() < 0.4 and not isinstance(effect, Shorter):
        fault = replace(fault, byte_range=_some_range(random, objects[name]))
    if random.random() < 0.25 and not errors & _UNAVAILABLE:
        # Once is enough to end a load, but a second request that raced it may have won.
        fault, outcome = replace(fault, attempts=(1,)), "either"
    # Of two harms that meet, the other one may be noticed first, and tried too often.
    return fault, outcome, errors | _UNAVAILABLE


def _some_range(random: Random, size_bytes: int) -> ByteRange:
    start = random.randrange(size_bytes)
    return ByteRange(start, random.randrange(start, size_bytes) + 1)
