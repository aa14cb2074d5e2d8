"""First bytes, rates, the link: exact times on a clock that the test moves."""

from __future__ import annotations

import pytest

from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import (
    Choice,
    Fault,
    FirstByte,
    Lognormal,
    Rate,
    Rig,
    Slower,
)
from fastload_common.testing.rig.pace import Pace
from tests.common.testing.rig_client import (
    DATA,
    ask,
    part,
    receive_head,
    sent,
)

SIZE = len(DATA)


def took_s(rig: Rig) -> list[float]:
    return [(r.ended_s or 0.0) - r.arrived_s for r in rig.log.gets()]


def test_first_byte_latency(timed: Rig) -> None:
    timed.faults = [Fault(FirstByte(0.25))]
    ask(timed)
    assert took_s(timed) == [0.25]


def test_drawn_latencies_are_those_of_the_seed(timed: Rig) -> None:
    waits: list[list[float]] = []
    for seed in (1, 1, 2):
        timed.arrange([Fault(FirstByte(Lognormal(0.03, 1.0)), seed=seed)])
        for _ in range(20):
            ask(timed, headers=part(0, 10))
        waits.append(took_s(timed))
    assert waits[0] == pytest.approx(waits[1])
    assert waits[0] != pytest.approx(waits[2])
    assert len({round(wait, 6) for wait in waits[0]}) == 20
    assert all(wait > 0 for wait in waits[0])
    timed.arrange([Fault(FirstByte(Choice((1.0, 2.0), (1.0, 0.0))))])
    ask(timed)
    assert took_s(timed) == [1.0]


@pytest.mark.parametrize("rate", [10.0, 50_000.0, 1e6])
def test_rate_of_a_connection(timed: Rig, rate: float) -> None:
    timed.faults = [Fault(Rate(rate))]
    asked = 100 if rate < 1000 else SIZE
    ask(timed, headers=part(0, asked))
    assert took_s(timed) == [pytest.approx(asked / rate, abs=0.021)]


def test_slower_multiplies(timed: Rig) -> None:
    timed.faults = [Fault(FirstByte(1.0)), Fault(Rate(SIZE / 2)), Fault(Slower(3.0))]
    ask(timed)
    assert took_s(timed) == [pytest.approx(3.0 + 6.0, abs=0.021)]


def test_link_limit_is_shared(timed: Rig) -> None:
    timed.limit_link(SIZE)
    for _ in range(3):
        ask(timed)
    assert sum(took_s(timed)) == pytest.approx(3.0, abs=0.1)
    timed.limit_link(None)
    timed.log.clear()
    ask(timed)
    assert took_s(timed) == [0.0]


def test_pace_is_a_queue_with_little_credit() -> None:
    pace = Pace(1000.0, now_s=10.0)
    assert pace.reserve(500, 10.0) == pytest.approx(10.5)
    assert pace.reserve(500, 10.0) == pytest.approx(11.0)
    # What came late catches up with 20 ms, and no more.
    assert pace.reserve(100, 20.0) == pytest.approx(20.08)
    with pytest.raises(ValueError, match="0 bytes per second"):
        Pace(0, 0.0)


def test_one_byte_a_second() -> None:
    clock = FakeClock()
    with Rig(clock) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        rig.faults = [Fault(Rate(1))]
        with sent(rig) as raw:
            receive_head(raw)
            for i in range(3):
                clock.wait_for_waiters(1)
                assert rig.log.gets()[0].sent_bytes == i
                clock.advance(1.0)
                assert raw.recv(10) == DATA[i : i + 1]


def test_slow_listing(timed: Rig) -> None:
    timed.faults = [Fault(FirstByte(3.0), methods=("LIST",), name="bucket/m/*")]
    ask(timed, "/bucket?list-type=2&prefix=m%2F")
    ask(timed, "/bucket?list-type=2&prefix=other")
    ask(timed)
    rows = timed.log.requests()
    waits = [(r.kind, (r.ended_s or 0.0) - r.arrived_s) for r in rows]
    assert waits == [("LIST", 3.0), ("LIST", 0.0), ("GET", 0.0)]
