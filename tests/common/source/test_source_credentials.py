"""Where credentials come from, and what is said when they are absent, wrong or expired."""

from __future__ import annotations

import datetime
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import AccessDeniedError, ConfigError
from fastload_common.ranges import ByteRange
from fastload_common.source.s3 import S3Source
from fastload_common.testing.fault_server import FaultServer
from fastload_common.testing.loopback import LoopbackHandler, LoopbackServer
from tests.common.source.conftest import OpenS3

WriteConfig = Callable[[str, str], None]


@pytest.fixture
def no_keys(fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> FaultServer:
    """The scripted server with an object, and no keys in the environment."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fault_server.put("bucket", "m/key", b"0123456789")
    return fault_server


def _use_everything(source: S3Source) -> None:
    """One request of each kind."""
    source.list()
    object_id = source.stat("key")
    assert source.read(object_id, ByteRange(2, 4)) == b"23"
    source.put_if_absent("other", b"x")


def _keys_used(server: FaultServer) -> set[str | None]:
    return {request.access_key for request in server.requests}


def test_environment(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"0123456789")
    source = open_s3("s3://bucket/m")
    _use_everything(source)
    assert _keys_used(fault_server) == {"ENVKEY"}
    assert source.describe().facts["credentials"] == "env"


def test_session_token_is_sent(
    fault_server: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-token")
    fault_server.put("bucket", "m/key", b"0123456789")
    source = open_s3("s3://bucket/m")
    _use_everything(source)
    assert {r.headers.get("x-amz-security-token") for r in fault_server.requests} == {"the-token"}
    assert "the-token" not in str(source.describe())


@pytest.mark.parametrize("variable", ["AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_profile(
    no_keys: FaultServer,
    open_s3: OpenS3,
    aws_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.delenv("AWS_REGION")
    aws_config(
        "[profile work]\nregion = eu-west-3\n",
        "[work]\naws_access_key_id = PROFILEKEY\naws_secret_access_key = profile-secret\n",
    )
    monkeypatch.setenv(variable, "work")
    source = open_s3("s3://bucket/m")
    _use_everything(source)
    assert _keys_used(no_keys) == {"PROFILEKEY"}
    assert {request.region for request in no_keys.requests} == {"eu-west-3"}
    assert source.describe().facts["credentials"] == "shared-credentials-file"


def test_profile_that_does_not_exist(
    no_keys: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="profile 'nobody' does not exist"):
        open_s3("s3://bucket/m").list()


def test_credential_process(
    no_keys: FaultServer, open_s3: OpenS3, aws_config: WriteConfig, tmp_path: Path
) -> None:
    reply = {"Version": 1, "AccessKeyId": "PROCESSKEY", "SecretAccessKey": "process-secret"}
    (tmp_path / "reply").write_text(json.dumps(reply))
    command = f"{sys.executable} -c \"print(open('{tmp_path}/reply').read())\""
    aws_config(f"[default]\ncredential_process = {command}\n", "")
    _use_everything(open_s3("s3://bucket/m"))
    assert _keys_used(no_keys) == {"PROCESSKEY"}


def test_s26_none_at_all(no_keys: FaultServer, open_s3: OpenS3) -> None:
    source = open_s3("s3://bucket/m")
    receiver = source.open_receiver()
    no_keys.allow_unsigned = True
    object_id = open_s3("s3://bucket/m", Settings(anonymous=True)).stat("key")
    asked = len(no_keys.requests)
    actions: list[Callable[[], object]] = [
        source.list,
        lambda: source.stat("key"),
        lambda: receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4))),
    ]
    for action in actions:
        with pytest.raises(AccessDeniedError, match="no credentials were found") as caught:
            action()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "FASTLOAD_ANONYMOUS"):
            assert name in str(caught.value)
    assert "no credentials" in source.describe().facts["error"]
    # Nothing unsigned went out.
    assert len(no_keys.requests) == asked
    receiver.close()


def test_only_a_part_of_them(
    no_keys: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    with pytest.raises(AccessDeniedError, match="only a part of the credentials"):
        open_s3("s3://bucket/m").list()


def test_s26_anonymous(no_keys: FaultServer, open_s3: OpenS3) -> None:
    no_keys.allow_unsigned = True
    source = open_s3("s3://bucket/m", Settings(anonymous=True))
    _use_everything(source)
    assert _keys_used(no_keys) == {None}
    assert source.describe().facts["credentials"] == "anonymous"
    assert source.describe().facts["anonymous"] == "yes"


def test_s26_anonymous_although_keys_are_there(fault_server: FaultServer, open_s3: OpenS3) -> None:
    fault_server.put("bucket", "m/key", b"0123456789")
    source = open_s3("s3://bucket/m", Settings(anonymous=True))
    with pytest.raises(AccessDeniedError, match="the bucket is not public"):
        source.list()
    assert _keys_used(fault_server) == {None}


# S13: expiry


def test_s13_static_token_that_expired_fails_after_one_renewal(
    fault_server: FaultServer, open_s3: OpenS3
) -> None:
    fault_server.put("bucket", "m/key", b"0123456789")
    source = open_s3("s3://bucket/m")
    object_id = source.stat("key")
    fault_server.expired_keys.add("ENVKEY")
    asked = len(fault_server.requests)
    with pytest.raises(AccessDeniedError, match="session token has expired"):
        source.read(object_id)
    assert len(fault_server.requests) - asked == 2
    with pytest.raises(AccessDeniedError, match="session token has expired"):
        source.list()


def test_s13_expired_token_is_replaced_once_for_all_receivers(
    no_keys: FaultServer, open_s3: OpenS3, aws_config: WriteConfig, tmp_path: Path
) -> None:
    # A process that gives another key each time, and counts its calls.
    script = tmp_path / "process.py"
    script.write_text(
        "import json, pathlib\n"
        f"calls = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "n = len(calls.read_text()) if calls.exists() else 0\n"
        "calls.write_text('x' * (n + 1))\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'KEY{n}', 'SecretAccessKey': 's',"
        " 'SessionToken': 't', 'Expiration': '2999-01-01T00:00:00Z'}))\n"
    )
    aws_config(f"[default]\ncredential_process = {sys.executable} {script}\n", "")
    source = open_s3("s3://bucket/m")
    object_id = source.stat("key")
    assert _keys_used(no_keys) == {"KEY0"}
    no_keys.expired_keys.add("KEY0")
    wrong: list[Exception] = []
    gate = threading.Barrier(6)

    def work() -> None:
        receiver = source.open_receiver()
        gate.wait()
        try:
            receiver.receive(object_id, ByteRange(0, 4), memoryview(bytearray(4)))
        except Exception as error:
            wrong.append(error)
        receiver.close()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert _keys_used(no_keys) == {"KEY0", "KEY1"}
    assert (tmp_path / "calls").read_text() == "xx"


# S11, S12: identity of a pod


class _TokenService(LoopbackServer):
    """STS, and a container's credential endpoint."""

    def __init__(self) -> None:
        super().__init__(_TokenHandler)
        self.calls: list[str] = []
        self.failures: list[tuple[int, str]] = []
        self.authorizations: list[str | None] = []


class _TokenHandler(LoopbackHandler):
    owner: _TokenService

    def do_GET(self) -> None:  # noqa: N802
        if self.path == "/pod":
            self._answer("container", self._container())
        elif self.path == "/latest/meta-data/iam/security-credentials/":
            self._answer("role", "node-role")
        else:
            self._answer("keys", self._container().replace("PODKEY", "NODEKEY"))

    def do_PUT(self) -> None:  # noqa: N802
        self._answer("token", "metadata-token")

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        action = dict(part.partition("=")[::2] for part in body.split("&"))["Action"]
        self._answer(action, self._sts())

    def _answer(self, call: str, body: str) -> None:
        self.owner.calls.append(call)
        self.owner.authorizations.append(self.headers.get("Authorization"))
        status = 200
        if self.owner.failures:
            status, code = self.owner.failures.pop(0)
            body = (
                f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code>"
                f"<Message>{code} was scripted</Message></Error></ErrorResponse>"
            )
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _container(self) -> str:
        expiration = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=6)
        return json.dumps(
            {
                "Code": "Success",
                "AccessKeyId": "PODKEY",
                "SecretAccessKey": "pod-secret",
                "Token": "pod-token",
                "Expiration": expiration.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        )

    def _sts(self) -> str:
        return (
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
            "<AccessKeyId>ROLEKEY</AccessKeyId><SecretAccessKey>role-secret</SecretAccessKey>"
            "<SessionToken>role-token</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration>"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )


@pytest.fixture
def token_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault_server: FaultServer
) -> Iterator[_TokenService]:
    (tmp_path / "token").write_text("pod-jwt\n")
    with _TokenService() as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.endpoint)
        yield service


@pytest.fixture
def web_identity(
    token_service: _TokenService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> _TokenService:
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/model-reader")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    return token_service


def test_s12_web_identity_asks_once_in_a_process(
    no_keys: FaultServer, web_identity: _TokenService, open_s3: OpenS3
) -> None:
    sources = [open_s3("s3://bucket/m"), open_s3("s3://bucket/m")]
    for source in sources:
        _use_everything(source)
    assert _keys_used(no_keys) == {"ROLEKEY"}
    assert sources[0].describe().facts["credentials"] == "assume-role-with-web-identity"
    assert web_identity.calls == ["AssumeRoleWithWebIdentity"]


def test_s12_web_identity_refused_names_the_role(
    no_keys: FaultServer,
    web_identity: _TokenService,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Would give other keys; must not be asked.
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{web_identity.endpoint}/pod")
    web_identity.failures = [(403, "AccessDenied")] * 10
    with pytest.raises(AccessDeniedError, match="AssumeRoleWithWebIdentity failed") as caught:
        open_s3("s3://bucket/m").list()
    assert "role/model-reader" in str(caught.value)
    assert "token" in str(caught.value)
    assert set(web_identity.calls) == {"AssumeRoleWithWebIdentity"}
    assert no_keys.requests == []


def test_s12_token_file_missing(
    no_keys: FaultServer, web_identity: _TokenService, open_s3: OpenS3, tmp_path: Path
) -> None:
    (tmp_path / "token").unlink()
    with pytest.raises(AccessDeniedError) as caught:
        open_s3("s3://bucket/m").list()
    assert str(tmp_path / "token") in str(caught.value)
    assert "role/model-reader" in str(caught.value)
    assert no_keys.requests == []


def test_s11_pod_identity(
    no_keys: FaultServer,
    token_service: _TokenService,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{token_service.endpoint}/pod")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "token").write_text("pod-jwt")
    source = open_s3("s3://bucket/m")
    _use_everything(source)
    assert _keys_used(no_keys) == {"PODKEY"}
    assert token_service.authorizations == ["pod-jwt"]
    assert source.describe().facts["credentials"] == "container-role"


def test_instance_role(
    no_keys: FaultServer,
    token_service: _TokenService,
    open_s3: OpenS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", token_service.endpoint)
    source = open_s3("s3://bucket/m")
    _use_everything(source)
    assert _keys_used(no_keys) == {"NODEKEY"}
    assert source.describe().facts["credentials"] == "iam-role"
    assert token_service.calls == ["token", "role", "keys"]


def test_s26_no_instance_metadata_is_found_out_soon(
    no_keys: FaultServer, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    # A listener that never answers, as where packets are dropped.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{port}")
        started_s = time.monotonic()
        with pytest.raises(AccessDeniedError, match="no credentials were found"):
            open_s3("s3://bucket/m").list()
        # Two requests of one second each, by the AWS tools' defaults.
        assert time.monotonic() - started_s < 8
