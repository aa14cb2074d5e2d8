"""Who asks: credentials of pods and roles, their end, none at all; proxies on the way to them."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import types
import zlib
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import AccessDeniedError, FastloadError
from fastload_common.source.registry import open_source
from fastload_common.testing.rig import Rig
from tests.cases.conftest import ROLE, WriteConfig
from tests.cases.harness import MODEL, SHARDS, URI, load, ranges, settings, signed_with
from tests.cases.identity import IdentityService
from tests.cases.worker import read_into_queue

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
    assert set(signed_with(rig)) == {key}
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
    assert set(signed_with(rig)) == {"KEY0", "KEY1"}


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
    assert set(signed_with(rig)) == {"KEY0"}


def test_s12_one_call_in_each_process(
    rig: Rig, identity: IdentityService, web_identity: Path
) -> None:
    context: Any = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    arguments = (URI, SHARDS[0], settings(concurrency=64), queue)
    children = [context.Process(target=read_into_queue, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    expected = zlib.crc32(MODEL.files[SHARDS[0]])
    assert [queue.get(timeout=60) for _ in children] == [expected] * 2
    for child in children:
        child.join()
    queue.close()
    queue.join_thread()
    assert identity.calls == ["sts"] * 2
    assert set(signed_with(rig)) == {"KEY0", "KEY1"}


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
    assert signed_with(rig) == ["KEY0"] * 8


# S26


def test_s26_unsigned_only_when_asked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.allow_unsigned = True
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDeniedError, match="no credentials were found"):
        load()
    assert rig.log.requests() == []
    assert MODEL.agrees(load(with_=settings(anonymous=True)))
    assert set(signed_with(rig)) == {"nobody"}


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
