"""Replies that break off, stall or end oddly, over TCP and over TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import (
    Close,
    Fault,
    Reset,
    Rig,
    Short,
    Stall,
    Unframed,
)
from fastload_common.testing.rig.effects import Effect
from tests.common.testing.rig_client import (
    DATA,
    KEY,
    ask,
    ends,
    part,
    receive,
    receive_head,
    sent,
    trusting,
)

SIZE = len(DATA)


@pytest.mark.parametrize(
    ("place", "bytes_sent"),
    [
        (Short(0), 0),
        (Short(1000), 1000),
        (Short(-1), SIZE - 1),
        (Short(after_share=0.5), SIZE // 2),
        (Reset(0), 0),
        (Reset(1000), 1000),
        (Reset(-1), SIZE - 1),
    ],
)
def test_s16_s18_body_that_breaks_off(rig: Rig, place: Effect, bytes_sent: int) -> None:
    rig.faults = [Fault(place)]
    with sent(rig) as raw:
        assert f"content-length: {SIZE}\r\n" in receive_head(raw)
        assert receive(raw, bytes_sent) == DATA[:bytes_sent]
        if isinstance(place, Reset):
            with pytest.raises(ConnectionResetError):
                raw.recv(1)
        else:
            assert raw.recv(1) == b""
    assert ends(rig) == ["reset" if isinstance(place, Reset) else "cut"]
    assert rig.log.gets()[0].sent_bytes == bytes_sent


def test_breaking_off_before_the_head(rig: Rig) -> None:
    rig.faults = [
        Fault(Short(after_bytes=None), attempts=(1,)),
        Fault(Reset(after_bytes=None), attempts=(2,)),
    ]
    with sent(rig) as raw:
        assert raw.recv(1) == b""
    with sent(rig) as raw, pytest.raises(ConnectionResetError):
        raw.recv(1)
    assert ask(rig).body == DATA
    assert ends(rig) == ["cut", "reset", "complete"]


def test_a_place_beyond_the_body_harms_nobody(rig: Rig) -> None:
    rig.faults = [Fault(Reset(SIZE + 1)), Fault(Short(201))]
    assert ask(rig, headers=part(0, 200)).body == DATA[:200]


def test_the_first_of_two_breaks_happens(rig: Rig) -> None:
    rig.faults = [Fault(Reset(2000)), Fault(Short(1000))]
    with sent(rig) as raw:
        receive_head(raw)
        assert len(receive(raw, SIZE)) == 1000


@pytest.mark.parametrize("at", [None, 0, 1000])
def test_s18_stall_until_it_is_released(rig: Rig, at: int | None) -> None:
    rig.faults = [Fault(Stall(after_bytes=at))]
    with sent(rig) as raw:
        if at is not None:
            receive_head(raw)
            assert receive(raw, at) == DATA[:at]
        rig.log.wait_for(lambda: bool(rig.log.stalled()))
        raw.setblocking(False)
        with pytest.raises(BlockingIOError):
            raw.recv(1)
        raw.settimeout(20)
        rig.release()
        if at is None:
            receive_head(raw)
        assert receive(raw, SIZE - (at or 0)) == DATA[at or 0 :]
    assert ends(rig) == ["complete"]


def test_stall_that_ends_by_itself() -> None:
    clock = FakeClock()
    with Rig(clock) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        rig.faults = [Fault(Stall(after_bytes=10, seconds=5.0))]
        with sent(rig) as raw:
            receive_head(raw)
            assert receive(raw, 10) == DATA[:10]
            clock.wait_for_waiters(1)
            clock.advance(5.0)
            assert receive(raw, SIZE - 10) == DATA[10:]


@pytest.fixture
def secure(authority: PrivateAuthority) -> Iterator[Rig]:
    with Rig(keys=[KEY], tls=authority.server_context("127.0.0.1")) as rig:
        rig.allow_unsigned = True
        rig.put("bucket", "m/key", DATA)
        yield rig


def test_s06_private_authority(secure: Rig, authority: PrivateAuthority) -> None:
    assert ask(secure, tls=trusting(authority)).body == DATA
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(secure, tls=ssl.create_default_context())
    # A client that does not trust it has not got as far as a request.
    assert len(secure.log.gets()) == 1


def test_s16_farewell_of_tls(secure: Rig, authority: PrivateAuthority) -> None:
    tls = trusting(authority)
    secure.faults = [
        Fault(Unframed(), attempts=(1, 2)),
        Fault(Close(close_notify=False), attempts=(2,)),
        Fault(Short(1000), attempts=(3, 4)),
        Fault(Short(1000, close_notify=False), attempts=(4,)),
        Fault(Reset(1000), attempts=(5,)),
    ]

    def end() -> object:
        with sent(secure, tls=tls) as raw:
            receive_head(raw)
            try:
                return len(receive(raw, SIZE + 1))
            except OSError as error:
                return type(error)

    assert [end() for _ in range(4)] == [SIZE, ssl.SSLEOFError, 1000, ssl.SSLEOFError]
    # Older Pythons call a reset an end, too.
    assert end() in (ConnectionResetError, ssl.SSLEOFError)
    assert ends(secure) == ["complete", "complete", "cut", "cut", "reset"]
