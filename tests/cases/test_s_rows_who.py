"""Who asks: credentials of pods and roles, their end, none at all; proxies on the way to them."""

from __future__ import annotations

import multiprocessing
import re
import socket
import threading
import types
import zlib
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import AccessDeniedError, FastloadError
from fastload_common.ranges import ByteRange
from fastload_common.source.aws_credentials import LastingCredentials
from fastload_common.source.registry import open_source
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.rig import EXPIRED_TOKEN, INTERNAL_ERROR, Error, Fault, FirstByte, Rig
from tests.cases.conftest import ROLE, WriteConfig
from tests.cases.harness import MODEL, SHARDS, URI, load, ranges, settings
from tests.cases.identity import IdentityService
from tests.cases.worker import load_into_queue


def _signed_with(rig: Rig) -> list[str]:
    found = []
    for request in rig.log.requests():
        match = re.search(r"Credential=([^/]*)/", request.headers.get("authorization", ""))
        found.append(match.group(1) if match else "nobody")
    return found


# S05


@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize("given", ["profile", "process"])
def test_s05_every_part_of_a_split_read_is_signed_alike(
    rig: Rig,
    aws_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    slots: int,
    given: str,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    key, secret = "RIGACCESSKEY", "rig-secret-key"
    if given == "profile":
        aws_config("", f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    else:
        reply = f'{{"Version": 1, "AccessKeyId": "{key}", "SecretAccessKey": "{secret}"}}'
        aws_config(f"[default]\ncredential_process = echo '{reply}'\n", "")
    memory_bytes = max(1024 * 1024, slots * 64 * 1024)
    chunk_bytes = memory_bytes // slots
    assert MODEL.agrees(
        load(with_=settings(memory_bytes=memory_bytes, chunk_bytes=min(chunk_bytes, 128 * 1024)))
    )
    assert set(_signed_with(rig)) == {key}
    for shard in SHARDS:
        assert len(rig.log.gets(f"m/{shard}")) >= 3
    assert {request.status for request in rig.log.requests()} <= {200, 206}


# S11


def test_s11_the_tokens_file_is_read_anew_and_stripped(
    rig: Rig, identity: IdentityService, pod: Path
) -> None:
    identity.failures = [(500, "InternalError")]
    with ranges() as read:
        object_id = read.source.stat(SHARDS[0])
        assert read.read(object_id) == MODEL.files[SHARDS[0]]
        # The pod's token is replaced, and the keys come to their end.
        pod.write_text("second-jwt\r\n")
        rig.expire(identity.issued[-1].access_key)
        assert read.read(object_id) == MODEL.files[SHARDS[0]]
    assert identity.authorizations == ["first-jwt", "first-jwt", "second-jwt"]
    assert set(identity.calls) == {"container"}
    assert set(_signed_with(rig)) == {"KEY0", "KEY1"}


@pytest.mark.parametrize("host", ["169.254.170.2", "169.254.170.23", "[fd00:ec2::23]", "127.0.0.1"])
def test_s11_the_addresses_of_clusters_are_allowed_over_http(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    asked = []

    def send(self: object, request: Any) -> None:
        asked.append(request.url)
        raise OSError

    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", send)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.RETRY_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://{host}/v1/credentials")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(FastloadError):
        load()
    assert asked[0] == f"http://{host}/v1/credentials"


# S12


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What botocore would have waited between attempts."""
    waits_s: list[float] = []
    quick = types.SimpleNamespace(sleep=waits_s.append)
    monkeypatch.setattr("botocore.endpoint.time", quick)
    return waits_s


def test_s12_throttled_sts_is_asked_again_and_by_one_only(
    rig: Rig, identity: IdentityService, web_identity: Path, no_waits: list[float]
) -> None:
    identity.failures = [(400, "Throttling")] * 3
    assert MODEL.agrees(load(with_=settings(concurrency=64)))
    assert identity.calls == ["sts"] * 4
    assert len(no_waits) == 3
    assert len(set(no_waits)) == 3  # jittered
    assert set(_signed_with(rig)) == {"KEY0"}


def test_s12_one_call_in_each_process(
    rig: Rig, identity: IdentityService, web_identity: Path
) -> None:
    context: Any = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    arguments = (URI, settings(concurrency=64), queue)
    children = [context.Process(target=load_into_queue, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    expected = {name: zlib.crc32(spec.data) for name, spec in MODEL.tensors.items()}
    assert [queue.get(timeout=60) for _ in children] == [expected] * 2
    for child in children:
        child.join()
    queue.close()
    queue.join_thread()
    assert identity.calls == ["sts"] * 2
    assert set(_signed_with(rig)) == {"KEY0", "KEY1"}


def test_s12_an_expired_session_is_renewed_by_one_call(
    rig: Rig, identity: IdentityService, web_identity: Path
) -> None:
    with ranges(with_=settings(concurrency=64)) as read:
        object_id = read.source.stat(SHARDS[0])
        rig.expire("KEY0")
        assert read.read(object_id) == MODEL.files[SHARDS[0]]
    assert identity.calls == ["sts"] * 2
    assert [r.status for r in rig.log.gets()].count(206) == len(read.chunks(object_id))


@pytest.mark.parametrize("failure", [(400, "Throttling"), (403, "AccessDenied")])
def test_s12_the_last_failure_names_role_file_and_code(
    rig: Rig,
    identity: IdentityService,
    web_identity: Path,
    no_waits: list[float],
    failure: tuple[int, str],
) -> None:
    identity.always = failure
    with pytest.raises(AccessDeniedError, match=failure[1]) as caught:
        load()
    assert ROLE in str(caught.value)
    assert str(web_identity) in str(caught.value)
    assert set(identity.calls) == {"sts"}
    assert rig.log.requests() == []


@pytest.mark.parametrize("state", ["missing", "a directory", "unreadable"])
def test_s12_a_token_file_that_cannot_be_read_is_named(
    rig: Rig,
    identity: IdentityService,
    web_identity: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    web_identity.unlink()
    if state == "a directory":
        web_identity.mkdir()
    elif state == "unreadable":  # by anybody but root, who may run this

        def refuse(self: object) -> str:
            raise PermissionError(13, "Permission denied", str(web_identity))

        monkeypatch.setattr("botocore.utils.FileWebIdentityTokenLoader.__call__", refuse)
    with pytest.raises(AccessDeniedError) as caught:
        load()
    assert ROLE in str(caught.value)
    assert str(web_identity) in str(caught.value)
    assert identity.calls == []
    assert rig.log.requests() == []


def test_s12_many_sources_of_a_process_share_one_call(
    rig: Rig, identity: IdentityService, web_identity: Path
) -> None:
    sources = [open_source(URI, settings()) for _ in range(8)]
    threads = [threading.Thread(target=source.list) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for source in sources:
        source.close()
    assert identity.calls == ["sts"]
    assert _signed_with(rig) == ["KEY0"] * 8


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


# S26


def test_s26_unsigned_only_when_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.allow_unsigned = True
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDeniedError, match="no credentials were found"):
        load()
    assert rig.log.requests() == []
    assert MODEL.agrees(load(with_=settings(anonymous=True)))
    assert set(_signed_with(rig)) == {"nobody"}


def test_s26_a_search_in_vain_asks_an_instances_metadata_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)
        with pytest.raises(AccessDeniedError, match="no credentials were found") as caught:
            load()
        silent.settimeout(0.0)
        accepted = 0
        while True:
            try:
                silent.accept()[0].close()
            except BlockingIOError:
                break
            accepted += 1
    # For a token, then without one: one second each by the AWS tools' defaults.
    assert accepted <= 2
    for provider in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        assert provider in str(caught.value)
    for provider in ("AWS_CONTAINER_CREDENTIALS_", "instance's role", "FASTLOAD_ANONYMOUS"):
        assert provider in str(caught.value)


def test_s26_a_profile_that_gives_old_keys_says_so(
    rig: Rig, aws_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    reply = (
        '{"Version": 1, "AccessKeyId": "K", "SecretAccessKey": "s", "SessionToken": "t", '
        '"Expiration": "2020-01-01T00:00:00Z"}'
    )
    aws_config(f"[default]\ncredential_process = echo '{reply}'\n", "")
    with pytest.raises(AccessDeniedError, match="token has expired"):
        load()
    assert rig.log.requests() == []
