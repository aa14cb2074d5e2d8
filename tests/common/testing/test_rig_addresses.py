"""Which requests a fault harms: by object, method, range, attempt, time and share."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from fastload_common.ranges import ByteRange
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import (
    SLOW_DOWN,
    Etag,
    Fault,
    Rig,
    Stall,
    Status,
)
from tests.common.testing.rig_client import (
    DATA,
    NAME,
    ask,
    ask_on,
    connect,
    part,
    receive_head,
    sent,
)

SIZE = len(DATA)


def harmed(rig: Rig, requests: list[Callable[[], object]]) -> list[bool]:
    for request in requests:
        request()
    rig.log.wait_until_idle()
    return [bool(r.faults) for r in rig.log.requests()]


def test_faults_are_addressed_by_name_and_method(rig: Rig) -> None:
    rig.put("bucket", "other", DATA)
    rig.faults = [Fault(Etag(), name="bucket/m/*", methods=("GET", "HEAD"))]
    assert harmed(
        rig,
        [
            lambda: ask(rig),
            lambda: ask(rig, method="HEAD"),
            lambda: ask(rig, "/bucket/other"),
            lambda: ask(rig, "/bucket?list-type=2&prefix=m%2Fk"),
            lambda: ask(rig, method="PUT", body=b""),
        ],
    ) == [True, True, False, False, False]


def test_faults_are_addressed_by_range(rig: Rig) -> None:
    rig.faults = [Fault(Etag(), byte_range=ByteRange(100, 200))]
    ranges = [(0, 100), (0, 101), (150, 160), (199, 300), (200, 300)]
    calls: list[Callable[[], object]] = [
        lambda r=r: ask(rig, headers=part(*r))  # type: ignore[misc]
        for r in ranges
    ]
    assert harmed(rig, [*calls, lambda: ask(rig)]) == [False, True, True, True, False, True]


def test_faults_are_addressed_by_attempt(rig: Rig) -> None:
    for attempts, expected in (
        ((1, 3), [True, False, True, False]),
        (lambda attempt: attempt > 2, [False, False, True, True]),
        (None, [True] * 4),
    ):
        rig.arrange([Fault(Etag(), attempts=attempts)])
        assert harmed(rig, [lambda: ask(rig)] * 4) == expected


def test_faults_are_addressed_by_time() -> None:
    clock = FakeClock()
    with Rig(clock) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        rig.arrange([Fault(SLOW_DOWN, from_s=1.0, until_s=2.0)])
        statuses = []
        for seconds in (0.5, 0.5, 0.75, 0.25):
            clock.advance(seconds)
            statuses.append(ask(rig).status)
        assert statuses == [200, 503, 503, 200]
        rig.restart_time()
        clock.advance(1.0)
        assert ask(rig).status == 503


def test_a_share_is_the_same_in_any_order(rig: Rig) -> None:
    parts = [part(i * 10, i * 10 + 10) for i in range(1000)]
    found = []
    for asked in (parts, parts[::-1]):
        rig.arrange([Fault(Etag(), share=0.2, seed=5)])
        connection = connect(rig)
        for headers in asked:
            ask_on(connection, headers=headers)
        connection.close()
        found.append({str(r.byte_range) for r in rig.log.gets() if r.faults})
    assert found[0] == found[1]
    assert 150 < len(found[0]) < 250


def test_two_shares_are_independent(rig: Rig) -> None:
    rig.faults = [Fault(Etag(), share=0.5), Fault(Status(200), share=0.5)]
    connection = connect(rig)
    for start in range(400):
        ask_on(connection, headers=part(start, start + 1))
    connection.close()
    met = Counter(r.faults for r in rig.log.gets())
    assert set(met) == {(), ("Etag",), ("Status",), ("Etag", "Status")}
    assert min(met.values()) > 60


def test_a_fault_of_one_connection_leaves_others_alone(rig: Rig) -> None:
    rig.faults = [Fault(Stall(), byte_range=ByteRange(0, 1))]
    with sent(rig) as raw:
        receive_head(raw)
        for _ in range(3):
            assert ask(rig, f"/{NAME}", part(1, 100)).body == DATA[1:100]
        assert isinstance(raw, socket.socket)
