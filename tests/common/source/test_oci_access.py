"""Who asks a registry: basic authentication, tokens, their life."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    ConfigError,
    SourceError,
)
from fastload_common.source.oci_auth import parse_challenges
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.scripted_registry import Answer, Asked
from tests.common.source.oci_bench import (
    DATA,
    Make,
    Open,
    assert_no_secret,
    read,
)

# Who asks


def test_basic_authentication(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry(auth="basic")
    source = open_oci(registry)
    assert read(source) == DATA[1000:2000]
    # Nothing is told before the registry asks.
    assert [asked.authorization is not None for asked in registry.log] == [False, True, True]
    facts = source.describe().facts
    assert facts["authentication"] == "basic"
    assert "s3cr3t" not in str(facts)


def test_a_token_is_fetched_once_and_renewed_before_its_end(
    make_registry: Make, open_oci: Open, oci_clock: FakeClock
) -> None:
    registry = make_registry(auth="bearer")
    source = open_oci(registry)
    for _ in range(3):
        read(source)
    assert len(registry.tokens) == 1
    (asked,) = [asked for asked in registry.log if asked.path == "/token"]
    assert asked.query == {"service": "test", "scope": "repository:m:pull"}
    oci_clock.advance(260)
    read(source)
    assert len(registry.tokens) == 1
    oci_clock.advance(15)  # 275 of 300 seconds
    read(source)
    assert len(registry.tokens) == 2


def test_a_token_that_is_refused_early_is_replaced(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry(auth="bearer")
    source = open_oci(registry)
    read(source)
    registry.ended.update(registry.tokens)
    assert read(source) == DATA[1000:2000]
    assert len(registry.tokens) == 2


def test_a_403_for_an_old_token_is_asked_again_with_a_new_one(
    make_registry: Make, open_oci: Open
) -> None:
    registry = make_registry(auth="bearer")
    source = open_oci(registry)
    read(source)
    old = set(registry.tokens)

    def refuse(asked: Asked) -> Answer | None:
        is_old = (asked.authorization or "").removeprefix("Bearer ") in old
        return Answer(403, b'{"errors": [{"code": "DENIED"}]}') if is_old else None

    registry.script = refuse
    assert read(source) == DATA[1000:2000]
    assert len(registry.tokens) == 2
    registry.script = lambda asked: Answer(403) if "/blobs/" in asked.path else None
    begin = len(registry.log)
    with pytest.raises(AccessDeniedError):
        read(source)
    assert len([asked for asked in registry.log[begin:] if "/blobs/" in asked.path]) == 2


def test_a_403_for_an_old_password_is_asked_again_with_the_new_one(
    make_registry: Make, open_oci: Open, tmp_path: Path
) -> None:
    """As a helper gives one every twelve hours; the same one again is not sent twice."""
    registry = make_registry(auth="basic")
    source = open_oci(registry)
    read(source)
    registry.password = "renewed-s3cr3t-pass"
    registry.script = lambda asked: (
        Answer(403) if asked.authorization and registry.usual(asked).status == 401 else None
    )
    begin = len(registry.log)
    with pytest.raises(AccessDeniedError):
        read(source)
    assert len(registry.log) == begin + 1
    (tmp_path / "config.json").write_text(json.dumps(registry.login()))
    assert read(source) == DATA[1000:2000]


def test_a_token_without_a_life_lives_a_minute(
    make_registry: Make, open_oci: Open, oci_clock: FakeClock
) -> None:
    registry = make_registry(auth="bearer")
    registry.token_life_s = None
    source = open_oci(registry)
    read(source)
    oci_clock.advance(40)
    read(source)
    assert len(registry.tokens) == 1
    oci_clock.advance(10)
    read(source)
    assert len(registry.tokens) == 2


def test_an_identity_token_is_exchanged(
    make_registry: Make, open_oci: Open, tmp_path: Path
) -> None:
    registry = make_registry(auth="bearer")
    entry = {"identitytoken": registry.identity_token}
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: entry}}))
    assert read(open_oci(registry)) == DATA[1000:2000]
    (asked,) = [asked for asked in registry.log if asked.path == "/token"]
    assert asked.method == "POST"
    assert asked.form["grant_type"] == "refresh_token"
    assert asked.authorization is None


def test_credentials_that_are_refused(
    make_registry: Make, open_oci: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for auth in ("basic", "bearer"):
        registry = make_registry(auth=auth)
        registry.password = "another-s3cr3t-pass"
        with pytest.raises(AccessDeniedError, match="not allowed") as caught:
            open_oci(registry).list()
        assert str(tmp_path / "config.json") in str(caught.value)
        assert_no_secret(caught.value, caplog)
        assert len(registry.log) <= 5


@pytest.mark.parametrize(
    ("auth", "where"), [("basic", "/manifests/"), ("bearer", "/manifests/"), ("bearer", "/token")]
)
def test_credentials_that_a_server_says_back_are_not_shown(
    make_registry: Make, open_oci: Open, caplog: pytest.LogCaptureFixture, auth: str, where: str
) -> None:
    registry = make_registry(auth=auth)

    def script(asked: Asked) -> Answer | None:
        if asked.authorization is None or where not in asked.path:
            return None
        text = f"cannot read {asked.authorization}: sorry"
        error = {"errors": [{"code": "DENIED", "message": text}]}
        return Answer(403, json.dumps(error).encode())

    registry.script = script
    with pytest.raises(AccessDeniedError, match=r"cannot read \*\*\* sorry") as caught:
        open_oci(registry).list()
    assert_no_secret(caught.value, caplog)
    assert not any(token in str(caught.value) for token in registry.tokens)


def test_no_credentials(make_registry: Make, open_oci: Open) -> None:
    registry = make_registry(auth="basic", login=False)
    with pytest.raises(AccessDeniedError, match="docker login"):
        open_oci(registry).list()
    with pytest.raises(AccessDeniedError, match="FASTLOAD_ANONYMOUS"):
        open_oci(registry, anonymous=True).list()


def test_anonymous_looks_for_no_credentials(
    make_registry: Make, open_oci: Open, tmp_path: Path
) -> None:
    registry = make_registry()
    (tmp_path / "config.json").write_text("damaged")
    assert read(open_oci(registry, anonymous=True)) == DATA[1000:2000]
    registry = make_registry(auth="basic", login=False)
    (tmp_path / "config.json").write_text("damaged")
    with pytest.raises(ConfigError, match="no JSON object"):
        open_oci(registry).list()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>", "holds none"),
        (b"{}", "holds none"),
        (b"[]", "holds none"),
        (b'{"token": 5}', "holds none"),
        (b'{"token": "a\\nb"}', "unprintable"),
        (b'{"token": "a", "expires_in": "soon"}', "holds none"),
    ],
)
def test_what_is_no_token(make_registry: Make, open_oci: Open, body: bytes, says: str) -> None:
    registry = make_registry(auth="bearer")
    registry.script = lambda asked: Answer(200, body) if asked.path == "/token" else None
    with pytest.raises(SourceError, match=says):
        open_oci(registry).list()


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "Negotiate",
        'Bearer service="x"',
        'Bearer realm="ftp://x/token"',
        'Bearer realm="https://u:p@x/token"',
        'Bearer realm="https://x:port/token"',
    ],
)
def test_challenges_that_cannot_be_met(make_registry: Make, open_oci: Open, challenge: str) -> None:
    registry = make_registry()
    registry.script = lambda asked: Answer(401, headers={"WWW-Authenticate": challenge})
    with pytest.raises(SourceError):
        open_oci(registry).list()
    assert len(registry.log) == 1


def test_a_registry_over_tls_does_not_get_a_token_in_the_open(
    make_registry: Make, open_oci: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = PrivateAuthority(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    registry = make_registry(tls=authority.server_context("127.0.0.1"))
    other = make_registry(login=False)
    realm = f'Bearer realm="{other.endpoint}/token"'
    registry.script = lambda asked: Answer(401, headers={"WWW-Authenticate": realm})
    with pytest.raises(SourceError, match="from HTTPS to plain HTTP"):
        open_oci(registry).list()
    assert other.log == []


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_it_is_told_once_that_another_host_gets_the_credentials(
    make_registry: Make, open_oci: Open, caplog: pytest.LogCaptureFixture, is_elsewhere: bool
) -> None:
    registry = make_registry(auth="bearer")
    other = make_registry(login=False)
    other.user, other.password, other.tokens = registry.user, registry.password, registry.tokens
    if is_elsewhere:
        realm = f'Bearer realm="{other.endpoint}/token",service="test"'

        def send_away(asked: Asked) -> Answer | None:
            usual = registry.usual(asked)
            return Answer(401, headers={"WWW-Authenticate": realm}) if usual.status == 401 else None

        registry.script = send_away
    caplog.set_level(logging.INFO)
    source = open_oci(registry)
    read(source)
    registry.ended.update(registry.tokens)
    read(source)
    assert len(registry.tokens) == 2
    told = [one for one in caplog.messages if "credentials go there" in one]
    assert len(told) == is_elsewhere
    assert all(registry.host in one and other.host in one for one in told)
    assert not [one for one in told if "/token" in one or "s3cr3t" in one]


def test_challenges_are_parsed() -> None:
    text = 'Basic realm="a, b", Bearer realm="https://x/t",service=s,scope="r:m:pull,push", Other'
    basic, bearer, other = parse_challenges(text)
    assert (basic.scheme, basic.parameters) == ("basic", {"realm": "a, b"})
    assert bearer.scheme == "bearer"
    assert bearer.parameters == {"realm": "https://x/t", "service": "s", "scope": "r:m:pull,push"}
    assert other.scheme == "other"
    assert parse_challenges("") == []
