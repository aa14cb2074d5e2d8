"""What is said when a load fails, and what is never said; errors that end a load at once."""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    FastloadError,
    ObjectChangedError,
    ObjectMissingError,
    OutOfBudgetError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange
from fastload_common.source.registry import open_source
from fastload_common.source.s3_errors import fault_error, parse_fault
from fastload_common.testing.rig import (
    ACCESS_DENIED,
    INTERNAL_ERROR,
    KMS_DISABLED,
    NO_SUCH_KEY,
    Error,
    Fault,
    Redirect,
    Rig,
    Stall,
)
from tests.cases.harness import BUCKET, MODEL, SHARDS, URI, load, ranges, settings
from tests.cases.identity import IdentityService

# Behind the header, and in one range of one shard.
INSIDE = ByteRange(300_000, 300_001)
HURRIED = settings(max_attempts=2, read_timeout_s=0.5)


def _inside(effect: Any) -> list[Fault]:
    return [Fault(effect, name=f"{BUCKET}/m/{SHARDS[0]}", byte_range=INSIDE)]


# S24


class _Cases:
    """One way to fail each; the store is there unless a case takes it away."""

    def __init__(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        self.request = request
        self.patch = monkeypatch
        self.tmp_path: Path = request.getfixturevalue("tmp_path")

    @property
    def rig(self) -> Rig:
        found: Rig = self.request.getfixturevalue("rig")
        return found

    def dns(self) -> None:
        self.patch.setenv("AWS_ENDPOINT_URL", "http://no-such-name.invalid:9000")
        load(with_=HURRIED)

    def refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            self.patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gone.getsockname()[1]}")
        load(with_=HURRIED)

    def tls(self) -> None:
        self.request.getfixturevalue("tls_rig")
        load(with_=HURRIED)

    def denied(self) -> None:
        self.rig.faults = _inside(ACCESS_DENIED)
        load(with_=HURRIED)

    def no_such_key(self) -> None:
        assert self.rig.port
        source = open_source(URI, HURRIED)
        try:
            source.stat("nothing")
        finally:
            source.close()

    def no_such_bucket(self) -> None:
        assert self.rig.port
        load("s3://no-such-bucket/m", HURRIED)

    def timeout(self) -> None:
        self.rig.faults = _inside(Stall(after_bytes=10))
        load(with_=HURRIED)

    def server_error(self) -> None:
        self.rig.faults = _inside(INTERNAL_ERROR)
        load(with_=HURRIED)

    def local_denied(self) -> None:
        for name, data in MODEL.files.items():
            (self.tmp_path / name).write_bytes(data)
        real = os.open

        def refuse(path: Any, *rest: Any, **more: Any) -> int:
            if str(path).endswith(SHARDS[0]):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *rest, **more)

        self.patch.setattr(os, "open", refuse)
        load(str(self.tmp_path), HURRIED)

    def local_directory(self) -> None:
        (self.tmp_path / "model.safetensors").mkdir()
        source = open_source(str(self.tmp_path), HURRIED)
        try:
            source.stat("model.safetensors")
        finally:
            source.close()

    def no_memory(self) -> None:
        assert self.rig.port

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        self.patch.setattr("fastload_common.staging.arena.mmap.mmap", fail)
        load(with_=HURRIED)


S3_WORDS = ("uri", "endpoint", "attempts")
REPLY_WORDS = (*S3_WORDS, "status", "request_id")
EXPECTED: dict[str, tuple[type[FastloadError], str, tuple[str, ...]]] = {
    "dns": (SourceUnavailableError, "resolve|Name or service", S3_WORDS),
    "refused": (SourceUnavailableError, "refused", S3_WORDS),
    "tls": (SourceError, "certificate verify failed", S3_WORDS),
    "denied": (AccessDeniedError, "not allowed to read", (*REPLY_WORDS, "range", "code")),
    "no_such_key": (ObjectMissingError, "no such object", REPLY_WORDS),
    "no_such_bucket": (ObjectMissingError, "no such bucket", (*REPLY_WORDS, "code")),
    "timeout": (SourceUnavailableError, "timed out|no byte came", ("uri", "range", "attempts")),
    "server_error": (
        SourceUnavailableError,
        "could not serve this now",
        (*REPLY_WORDS, "range", "code"),
    ),
    "local_denied": (AccessDeniedError, "not allowed to open", ("errno",)),
    "local_directory": (ObjectMissingError, "is a directory", ()),
    "no_memory": (OutOfBudgetError, "memory", ()),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_s24_every_failure_tells_what_where_and_how_often(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    case: str,
) -> None:
    kind, words, fields = EXPECTED[case]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "RIGACCESSKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "rig-secret-key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    cases = _Cases(request, monkeypatch)
    with caplog.at_level(logging.DEBUG), pytest.raises(kind, match=words) as caught:
        getattr(cases, case)()
    error = caught.value
    text = str(error)
    assert type(error) is kind
    for field in fields:
        assert error.fields[field] not in (None, ""), f"{field} in {text}"
        assert f"{field}=" in text
    assert "\n" not in text
    for other, (_, other_words, _) in EXPECTED.items():
        if other != case:
            assert not any(word in text for word in other_words.split("|")), (other, text)
    _check_secrets(text + "".join(caplog.messages) + "".join(capfd.readouterr()), "rig-secret-key")


def _check_secrets(said: str, *secrets: str) -> None:
    for secret in (*secrets, "X-Amz-Signature="):
        assert secret not in said
    assert "Signature=" not in said.replace("Signature=***", "")


def test_s24_no_level_of_the_log_shows_a_secret(
    rig: Rig,
    identity: IdentityService,
    web_identity: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert MODEL.agrees(load())
        rig.expire("KEY0")
        assert MODEL.agrees(load())
        rig.faults = _inside(ACCESS_DENIED)
        with pytest.raises(AccessDeniedError) as caught:
            load()
    said = str(caught.value) + "".join(caught.value.__notes__) + caplog.text
    said += "".join(capfd.readouterr())
    # It was logged in full, but for that.
    assert "AssumeRoleWithWebIdentity" in said
    signatures = {
        request.headers["authorization"].rpartition("=")[2] for request in rig.log.requests()
    }
    secrets = {part for key in identity.issued for part in (key.secret_key, key.token or "")}
    _check_secrets(said, *secrets, *signatures, web_identity.read_text())


# Permanent errors


PERMANENT = {
    "403": (ACCESS_DENIED, AccessDeniedError, "s3:GetObject"),
    "404": (NO_SUCH_KEY, ObjectChangedError, "replaced or deleted"),
    "301": (Redirect("eu-north-1"), SourceError, "eu-north-1"),
    "301 without a region": (Redirect(None), SourceError, "elsewhere than in region us-east-1"),
    "KMS disabled": (KMS_DISABLED, SourceError, "KMS key"),
    "KMS missing": (Error(400, "KMS.NotFoundException"), SourceError, "KMS key"),
    "bad signature": (Error(403, "SignatureDoesNotMatch"), AccessDeniedError, "secret key"),
    "archived": (Error(403, "InvalidObjectState"), SourceError, "InvalidObjectState"),
}


@pytest.mark.parametrize("case", PERMANENT)
def test_s24_what_cannot_get_better_is_not_asked_again(rig: Rig, case: str) -> None:
    effect, kind, words = PERMANENT[case]
    rig.faults = _inside(effect)
    with pytest.raises(kind, match=words) as caught:
        load()
    assert isinstance(caught.value, SourceError)
    assert not caught.value.retryable
    asked = [request for request in rig.log.gets(f"m/{SHARDS[0]}") if request.overlaps(INSIDE)]
    # A region that is named is tried once.
    assert len(asked) == (2 if case == "301" else 1)


def test_s24_kms_permissions_are_named() -> None:
    role = "arn:aws:sts::123456789012:assumed-role/" + "a-role-with-a-long-name-" * 8
    said = f"User: {role}/i-0123 is not authorized to perform: kms:Decrypt on the resource"
    body = f"<Error><Code>AccessDenied</Code><Message>{said}</Message></Error>".encode()
    fault = parse_fault(403, {}, body)
    error = fault_error(fault, "read s3://bucket/key", pinned=True)
    assert type(error) is AccessDeniedError
    assert "KMS key" in error.hint
    assert "kms:Decrypt on the resource" in str(error)


def test_s24_kms_that_is_busy_is_asked_again(rig: Rig) -> None:
    fault = Fault(
        Error(400, "KMS.ThrottlingException"),
        name=f"*{SHARDS[0]}",
        byte_range=INSIDE,
        attempts=(1,),
    )
    rig.faults = [fault]
    assert MODEL.agrees(load())


def test_s24_attempts_are_counted_in_the_message(rig: Rig) -> None:
    rig.faults = _inside(INTERNAL_ERROR)
    with ranges(with_=settings(max_attempts=3)) as read:
        object_id = read.source.stat(SHARDS[0])
        with pytest.raises(SourceUnavailableError, match=r"attempts=3"):
            read.read(object_id)
    asked = [request for request in rig.log.gets() if request.overlaps(INSIDE)]
    assert len(asked) == 3
