"""The request log, and that nothing stays open when the rig ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from fastload_common.ranges import ByteRange
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import Fault, FirstByte, Rate, Rig, Stall
from tests.common.testing.rig_client import (
    DATA,
    KEY,
    ask,
    part,
    receive,
    receive_head,
    sent,
    trusting,
)


def test_a_request_is_logged(rig: Rig) -> None:
    ask(rig, headers=part(100, 300) | {"X-Test": "yes"})
    (request,) = rig.log.requests()
    assert (request.kind, request.bucket, request.key) == ("GET", "bucket", "m/key")
    assert request.byte_range == ByteRange(100, 300)
    assert request.headers["x-test"] == "yes"
    assert (request.status, request.sent_bytes, request.attempt) == (206, 200, 1)
    assert request.ended_s is not None
    assert request.arrived_s <= request.ended_s
    assert not request.signed
    assert rig.log.bytes_sent == 200


def test_attempts_count_overlapping_ranges(rig: Rig) -> None:
    rig.put("bucket", "m/other", DATA)
    for start, end in ((0, 100), (100, 200), (50, 150), (150, 160), (0, 100)):
        ask(rig, headers=part(start, end))
    ask(rig, "/bucket/m/other", part(0, 100))
    ask(rig, method="HEAD")
    assert [r.attempt for r in rig.log.gets("m/key")] == [1, 1, 3, 2, 3]
    assert [r.attempt for r in rig.log.gets("m/other")] == [1]
    assert [r.attempt for r in rig.log.requests("HEAD")] == [1]
    rig.log.clear()
    ask(rig, headers=part(0, 100))
    assert [r.attempt for r in rig.log.gets()] == [1]


def test_times_are_those_of_the_clock() -> None:
    clock = FakeClock(start_s=500.0)
    with Rig(clock) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        rig.faults = [Fault(FirstByte(30.0))]
        with sent(rig) as raw:
            clock.wait_for_waiters(1)
            assert (rig.log.in_flight, rig.log.gets()[0].status) == (1, 0)
            clock.advance(30.0)
            receive_head(raw)
            assert receive(raw, len(DATA)) == DATA
            rig.log.wait_until_idle()
        (request,) = rig.log.gets()
        assert (request.arrived_s, request.ended_s) == (500.0, 530.0)


def test_peaks(rig: Rig) -> None:
    rig.faults = [Fault(Stall())]
    with sent(rig) as first, sent(rig) as second, sent(rig) as third:
        rig.log.wait_for(lambda: len(rig.log.stalled()) == 3)
        assert (rig.log.in_flight, rig.log.open_connections) == (3, 3)
        rig.release()
        for raw in (first, second, third):  # who leaves before the last byte has left it
            receive_head(raw)
            assert receive(raw, len(DATA)) == DATA
        rig.log.wait_until_idle()
    rig.log.wait_until_unconnected()
    summary = rig.log.summary()
    assert (summary["peak_in_flight"], summary["peak_connections"]) == (3, 3)
    assert summary["ended"] == {"complete": 3}
    assert summary["bytes_sent"] == 3 * len(DATA)
    assert summary["faults"] == {"Stall": 3}


def test_a_client_that_goes_away_is_noticed_while_it_waits(rig: Rig) -> None:
    for effect in (Stall(after_bytes=None), Stall(after_bytes=1000), FirstByte(1e5), Rate(0.001)):
        rig.arrange([Fault(effect)])
        with sent(rig):
            rig.log.wait_for(lambda: rig.log.in_flight == 1)
        rig.log.wait_until_unconnected()
        assert [r.ended for r in rig.log.gets()] == ["client closed"], effect


def test_waiting_for_what_does_not_come_ends(rig: Rig) -> None:
    with sent(rig) as raw:
        receive_head(raw)
        with pytest.raises(TimeoutError, match="1 connections open"):
            rig.log.wait_until_unconnected(timeout_s=0.01)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("secure", [False, True])
def test_nothing_is_left_when_it_ends(authority: PrivateAuthority, secure: bool) -> None:
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    tls = authority.server_context("127.0.0.1") if secure else None
    with contextlib.ExitStack() as clients:
        with Rig(keys=[KEY], tls=tls) as rig:
            rig.allow_unsigned = True
            rig.put("bucket", "m/key", DATA)
            rig.faults = [
                Fault(Stall(after_bytes=10), attempts=(1,)),
                Fault(Stall(after_bytes=None), attempts=(2,)),
                Fault(FirstByte(1e5), attempts=(3,)),
                Fault(Rate(1), attempts=(4,)),
            ]
            for _ in range(5):
                clients.enter_context(sent(rig, tls=trusting(authority) if secure else None))
            # And one that says nothing, not even the handshake's first word.
            silent = socket.create_connection(("127.0.0.1", rig.port))
            clients.enter_context(silent)
            rig.log.wait_for(lambda: len(rig.log.gets()) == 5)
            rig.log.wait_for(lambda: rig.log.open_connections == 6 and rig.log.in_flight == 4)
        assert set(threading.enumerate()) == threads
    assert open_descriptors() == descriptors
    assert [r.ended for r in rig.log.gets()] == ["rig stopped"] * 4 + ["complete"]
    rig.stop()


def test_it_can_start_again(rig: Rig) -> None:
    first = rig.port
    rig.stop()
    with pytest.raises(OSError, match="refused"):
        ask(rig)
    rig.start()
    assert ask(rig).body == DATA
    assert first > 0


def test_an_error_of_the_rig_itself_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.start()
    monkeypatch.setattr(rig, "answer", lambda *_: 1 / 0)
    with sent(rig) as raw:
        assert receive(raw, 1) == b""
    with pytest.raises(ZeroDivisionError):
        rig.stop()
    assert rig.log.gets()[0].ended == "rig crashed"
