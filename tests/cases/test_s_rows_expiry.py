"""Keys that come to their end while a load runs, and clocks that are wrong."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fastload_common.errors import AccessDeniedError
from fastload_common.ranges import ByteRange
from fastload_common.source.aws_credentials import LastingCredentials
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import EXPIRED_TOKEN, INTERNAL_ERROR, Error, Fault, FirstByte, Rig
from tests.cases.harness import MODEL, SHARDS, load, ranges, settings
from tests.cases.identity import IdentityService

# S13


class _Keys:
    """botocore's refreshable credentials on a clock of ours: asked within 15 minutes of their end,
    they renew themselves."""

    def __init__(self, clock: FakeClock, lifetime_s: float) -> None:
        self.clock = clock
        self.lifetime_s = lifetime_s
        self.issues = 0
        self.end_s = -1.0
        self.method = "stub"
        self.broken = False

    def refresh_needed(self, refresh_in: float) -> bool:
        return self.end_s - self.clock.monotonic_s() < refresh_in

    def get_frozen_credentials(self) -> tuple[str, int]:
        if self.refresh_needed(15 * 60):
            if self.broken:
                raise OSError("no keys today")
            self.issues += 1
            self.end_s = self.clock.monotonic_s() + self.lifetime_s
        return ("key", self.issues)


@pytest.mark.parametrize("lifetime_s", [5, 900, 3600, 6 * 3600])
def test_s13_one_renewal_for_each_issue_however_short_it_lives(lifetime_s: int) -> None:
    clock = FakeClock(auto=True)
    keys = _Keys(clock, lifetime_s)
    lasting = LastingCredentials(keys, clock)
    steps = 400
    for _ in range(steps):
        lasting.get_frozen_credentials()
        # Never with keys that have ended, and renewed ahead of that.
        assert keys.end_s > clock.monotonic_s()
        clock.advance(lifetime_s / 100)
    assert keys.issues <= 1 + steps / 100 / 0.75


def test_s13_keys_that_are_still_good_outlive_a_failed_renewal() -> None:
    clock = FakeClock(auto=True)
    keys = _Keys(clock, 1000)
    lasting = LastingCredentials(keys, clock)
    first = lasting.get_frozen_credentials()
    keys.broken = True
    clock.advance(990)
    assert lasting.get_frozen_credentials() == first
    clock.advance(11)
    with pytest.raises(OSError, match="no keys today"):
        lasting.get_frozen_credentials()
    keys.broken = False
    assert lasting.get_frozen_credentials() != first


def test_s13_many_threads_cause_one_renewal() -> None:
    clock = FakeClock()
    keys = _Keys(clock, 1000)
    lasting = LastingCredentials(keys, clock)
    gate = threading.Barrier(16)
    seen = []

    def ask() -> None:
        gate.wait()
        seen.append(lasting.get_frozen_credentials())

    for issue in (1, 2):
        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(seen) == {("key", issue)}
        seen.clear()
        clock.advance(1001)
    assert keys.issues == 2


def test_s13_keys_that_live_for_a_second(rig: Rig, identity: IdentityService, pod: Path) -> None:
    identity.lifetime_s = 1.0
    rig.faults = [Fault(FirstByte(0.2))]
    assert MODEL.agrees(load(with_=settings(concurrency=2)))
    asked = len(rig.log.gets())
    assert 2 < len(identity.issued) < asked / 2


def test_s13_what_is_in_flight_when_keys_end_is_signed_again_alone(
    rig: Rig, identity: IdentityService, pod: Path
) -> None:
    with ranges(with_=settings(concurrency=30)) as read:
        object_id = read.source.stat(SHARDS[0])
        rig.expire("KEY0")
        assert read.read(object_id) == MODEL.files[SHARDS[0]]
    assert identity.calls == ["container"] * 2
    gets = rig.log.gets()
    refused = [request for request in gets if request.status == 400]
    assert refused
    for request in refused:
        again = [r for r in gets if r.status == 206 and r.byte_range == request.byte_range]
        assert len(again) == 1
    assert len(gets) == len(refused) + len(read.chunks(object_id))
    assert read.stats.snapshot()["errors"] == {}


def test_s13_every_attempt_is_signed_anew(rig: Rig) -> None:
    # A second later, so that an old signature can be told from a new one.
    rig.faults = [Fault(Error(500, "InternalError", retry_after_s=1), attempts=(1,))]
    with ranges(with_=settings(concurrency=16)) as read:
        assert read.read(read.source.stat(SHARDS[0])) == MODEL.files[SHARDS[0]]
    signatures = [request.headers["authorization"] for request in rig.log.gets()]
    assert len(signatures) >= 2 * len(MODEL.files[SHARDS[0]]) // (64 * 1024)
    assert len(set(signatures)) == len(signatures)
    assert INTERNAL_ERROR.status in {request.status for request in rig.log.gets()}


def test_s13_static_keys_that_ended_fail_at_once(rig: Rig) -> None:
    body = ByteRange(200_000, 1_000_000)
    rig.faults = [Fault(EXPIRED_TOKEN, byte_range=body)]
    with pytest.raises(AccessDeniedError, match="token has expired") as caught:
        load()
    assert caught.value.fields["code"] == "ExpiredToken"
    assert max(request.attempt for request in rig.log.gets()) <= 2


@pytest.mark.parametrize("offset_s", [1200.0, -1200.0])
def test_s13_a_wrong_clock_is_called_one(rig: Rig, offset_s: float) -> None:
    rig.clock_offset_s = offset_s
    with pytest.raises(AccessDeniedError, match="clock skew") as caught:
        load()
    assert caught.value.fields["code"] == "RequestTimeTooSkewed"
    assert len(rig.log.requests()) == 1
