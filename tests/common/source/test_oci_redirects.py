"""Registries that send us to a store, and mirrors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import (
    AccessDeniedError,
    ObjectMissingError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.source.oci_reference import digest_of
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.scripted_registry import (
    Answer,
    Asked,
    ScriptedRegistry,
    ScriptedStorage,
)
from tests.common.source.oci_bench import (
    DATA,
    Make,
    Open,
    assert_no_secret,
    read,
    stamp,
)

# Redirects


def redirecting(make_registry: Make, storage: ScriptedStorage, **more: Any) -> ScriptedRegistry:
    registry = make_registry(**more)
    registry.storage = storage
    return registry


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_a_redirect_gets_no_authorization(
    make_registry: Make, open_oci: Open, storage: ScriptedStorage, auth: str
) -> None:
    registry = redirecting(make_registry, storage, auth=auth)
    source = open_oci(registry)
    for _ in range(3):
        assert read(source) == DATA[1000:2000]
    assert len(storage.log) == 3
    assert [asked.authorization for asked in storage.log] == [None] * 3
    # One URL for all of them: the registry is asked once.
    assert len(storage.signatures) == 1
    assert registry.count("/blobs/") == 1


def test_a_signed_url_is_not_used_past_its_life(
    make_registry: Make, open_oci: Open, storage: ScriptedStorage, oci_clock: FakeClock
) -> None:
    registry = redirecting(make_registry, storage)
    source = open_oci(registry)
    for elapsed_s, signatures in ((0, 1), (500, 1), (60, 1), (15, 2), (100, 2), (100_000, 3)):
        oci_clock.advance(elapsed_s)
        storage.stamp = stamp(oci_clock)
        assert read(source) == DATA[1000:2000]
        assert len(storage.signatures) == signatures
    # Each was used before its end only.
    uses = [asked.query["X-Amz-Signature"] for asked in storage.log]
    assert uses == [storage.signatures[i] for i in (0, 0, 0, 1, 1, 2)]


def test_a_url_that_does_not_tell_its_life_is_used_once(
    make_registry: Make, open_oci: Open, storage: ScriptedStorage
) -> None:
    registry = redirecting(make_registry, storage)
    registry.url_life_s = None
    source = open_oci(registry)
    for _ in range(4):
        assert read(source) == DATA[1000:2000]
    assert len({asked.query["X-Amz-Signature"] for asked in storage.log}) == 4
    assert len(storage.log) == 4


def test_a_signed_url_that_is_refused_early_is_replaced_once(
    make_registry: Make,
    open_oci: Open,
    storage: ScriptedStorage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = redirecting(make_registry, storage)
    source = open_oci(registry)
    read(source)
    storage.ended.update(storage.signatures)
    assert read(source) == DATA[1000:2000]
    assert len(storage.signatures) == 2
    caplog.set_level(logging.DEBUG)
    storage.script = lambda asked: Answer(403, str(asked.query).encode())
    with pytest.raises(AccessDeniedError, match="refused several times") as caught:
        read(source)
    assert_no_secret(caught.value, caplog)
    # Who refused is the store; nobody is to look at the credentials for the registry.
    said = str(caught.value)
    assert f"the store http://{storage.host}, where the registry http://{registry.host}" in said
    assert caught.value.fields["endpoint"] == f"http://{storage.host}"
    assert "come from" not in said


@pytest.mark.parametrize("status", [404, 500, 503])
def test_faults_of_the_store(
    make_registry: Make, open_oci: Open, storage: ScriptedStorage, status: int
) -> None:
    registry = redirecting(make_registry, storage)
    storage.script = lambda asked: Answer(status)
    kind = ObjectMissingError if status == 404 else SourceUnavailableError
    with pytest.raises(kind):
        read(open_oci(registry))


def test_redirects_end(make_registry: Make, open_oci: Open, storage: ScriptedStorage) -> None:
    registry = redirecting(make_registry, storage)
    count = iter(range(1000))

    def again(asked: Asked) -> Answer:
        return Answer(302, headers={"Location": f"{storage.endpoint}/again/{next(count)}"})

    storage.script = again
    with pytest.raises(SourceError, match="too many redirects"):
        read(open_oci(registry))


def test_a_redirect_of_a_redirect(
    make_registry: Make, open_oci: Open, storage: ScriptedStorage
) -> None:
    for life_s in (600, None):
        registry = redirecting(make_registry, storage)
        registry.url_life_s = life_s

        def once_more(asked: Asked, registry: ScriptedRegistry = registry) -> Answer | None:
            if asked.path.startswith("/store/") and "second" not in asked.query:
                url = storage.url(registry, digest_of(DATA))
                return Answer(302, headers={"Location": url + "&second=1"})
            return None

        storage.script = once_more
        source = open_oci(registry)
        for start in (0, 1000):
            assert read(source, start, start + 100) == DATA[start : start + 100]


def test_a_redirect_does_not_lead_into_the_open(
    make_registry: Make,
    open_oci: Open,
    storage: ScriptedStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = PrivateAuthority(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    registry = redirecting(make_registry, storage, tls=authority.server_context("127.0.0.1"))
    with pytest.raises(SourceError, match="from HTTPS to plain HTTP") as caught:
        read(open_oci(registry))
    assert_no_secret(caught.value, caplog)
    assert storage.log == []
    # Unless the operator says so.
    assert read(open_oci(registry, "m:v", storage)) == DATA[1000:2000]


def test_manifests_may_be_redirected_too(make_registry: Make, open_oci: Open) -> None:
    registry, other = make_registry(auth="basic"), make_registry(login=False)

    def redirect(asked: Asked) -> Answer | None:
        if asked.path == "/v2/m/manifests/v" and asked.authorization:
            return Answer(307, headers={"Location": f"{other.endpoint}/x/manifests/v"})
        return None

    registry.script = redirect
    assert read(open_oci(registry)) == DATA[1000:2000]
    assert [asked.authorization for asked in other.log] == [None]


@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_refuses_a_manifest_is_named(
    make_registry: Make, open_oci: Open, status: int
) -> None:
    registry, other = make_registry(auth="basic"), make_registry(login=False)
    registry.script = lambda asked: (
        Answer(307, headers={"Location": f"{other.endpoint}/x"}) if asked.authorization else None
    )
    other.script = lambda asked: Answer(status)
    with pytest.raises(AccessDeniedError, match="the registry itself did not") as caught:
        open_oci(registry).list()
    assert caught.value.fields["endpoint"] == f"http://{other.host}"


# Mirrors


def test_a_mirror_is_asked_first(make_registry: Make, open_oci: Open) -> None:
    mirror, registry = make_registry(login=False), make_registry()
    source = open_oci(registry, "m:v", mirror, oci_mirrors=(f"{registry.host}={mirror.host}",))
    assert read(source) == DATA[1000:2000]
    assert registry.log == []
    assert {asked.query["ns"] for asked in mirror.log} == {registry.host}


@pytest.mark.parametrize("fault", [Answer(404), Answer(500), Answer(401), Answer(200, b"<html>")])
def test_what_a_mirror_does_not_give_comes_from_the_registry(
    make_registry: Make, open_oci: Open, caplog: pytest.LogCaptureFixture, fault: Answer
) -> None:
    mirror, registry = make_registry(login=False), make_registry(auth="basic")
    mirror.script = lambda asked: fault
    source = open_oci(registry, "m:v", mirror, oci_mirrors=(f"{registry.host}={mirror.host}",))
    assert read(source) == DATA[1000:2000]
    assert "the mirror is not used" in caplog.text


def test_a_mirror_that_lacks_a_layer(make_registry: Make, open_oci: Open) -> None:
    mirror, registry = make_registry(login=False), make_registry(auth="basic")
    mirror.blobs.clear()
    source = open_oci(registry, "m:v", mirror, oci_mirrors=(f"{registry.host}={mirror.host}",))
    for _ in range(3):
        assert read(source) == DATA[1000:2000]
    assert mirror.count("/blobs/") == 1
    assert all(asked.authorization is None for asked in mirror.log)


def test_the_registrys_own_error_counts(make_registry: Make, open_oci: Open) -> None:
    mirror, registry = make_registry(login=False), make_registry()
    for one in (mirror, registry):
        one.documents.clear()
    source = open_oci(registry, "m:v", mirror, oci_mirrors=(f"{registry.host}={mirror.host}",))
    with pytest.raises(ObjectMissingError) as caught:
        source.list()
    assert str(registry.port) in str(caught.value.fields["endpoint"])
