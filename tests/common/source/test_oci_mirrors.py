"""Mirrors that serve wrong bytes, or die in the middle: who goes on, and whom errors name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fastload_common.errors import (
    ChecksumMismatchError,
    ObjectMissingError,
    RangeMismatchError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange
from fastload_common.source.http_message import Endpoint
from fastload_common.source.oci import OciSource
from fastload_common.source.oci_choice import PlaceChoice
from fastload_common.source.oci_places import Place
from fastload_common.testing.scripted_registry import (
    Answer,
    Asked,
    ScriptedRegistry,
    ScriptedStorage,
    ranged,
)
from fastload_common.units import MIB
from tests.common.source.oci_bench import DATA, NAMED, RAW, Make, Open, assert_no_secret, read

DAMAGED = DATA[:-1] + b"!"
CONFIG = {"org.cncf.model.filepath": "config.json"}
Mirrored = Callable[..., tuple[ScriptedRegistry, ScriptedRegistry, OciSource]]


@pytest.fixture
def mirrored(make_registry: Make, open_oci: Open) -> Mirrored:
    """A mirror, the registry behind it, and a source that has its manifest from the mirror."""

    def make(**more: Any) -> tuple[ScriptedRegistry, ScriptedRegistry, OciSource]:
        mirror, registry = make_registry(login=False), make_registry(**more)
        for one in (mirror, registry):
            layers = [one.put(b"{}", RAW, CONFIG), one.put(DATA, RAW, NAMED)]
            one.artifact("v", layers)
        mirrors = (f"{registry.host}={mirror.host}",)
        source = open_oci(registry, "m:v", mirror, oci_mirrors=mirrors)
        assert source.stat("model.safetensors").size_bytes == len(DATA)
        assert registry.log == []
        return mirror, registry, source

    return make


def blobs(answer: Callable[[Asked], Answer]) -> Callable[[Asked], Answer | None]:
    return lambda asked: answer(asked) if "/blobs/" in asked.path else None


def cut_at_once(asked: Asked) -> Answer:
    """The head of a good reply, and no byte of its body."""
    good = ranged(DATA, asked)
    return Answer(good.status, good.body, good.headers, cut_bytes=0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


# Wrong bytes


def test_a_whole_file_that_a_mirror_damages_comes_from_the_registry(
    mirrored: Mirrored, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, _, source = mirrored(auth="basic")
    mirror.script = blobs(lambda asked: ranged(DAMAGED, asked))
    for _ in range(2):
        assert source.read(source.stat("model.safetensors")) == DATA
    assert mirror.count("/blobs/") == 2  # once is chance
    assert all(asked.authorization is None for asked in mirror.log)
    (warning,) = warnings(caplog)
    assert f"http://{mirror.host}" in warning
    assert "not what its digest says" in warning


def test_an_error_names_who_sent_other_bytes(mirrored: Mirrored) -> None:
    mirror, registry, source = mirrored()
    for one in (mirror, registry):
        one.script = blobs(lambda asked: ranged(DAMAGED, asked))
    with pytest.raises(ChecksumMismatchError) as caught:
        source.read(source.stat("model.safetensors"))
    assert caught.value.fields["endpoint"] == f"http://{registry.host}"
    assert registry.count("/blobs/") == 2


def test_the_store_behind_is_named_without_its_url(
    mirrored: Mirrored, storage: ScriptedStorage, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, registry, source = mirrored()
    mirror.script = blobs(lambda asked: ranged(DAMAGED, asked))
    registry.storage = storage
    storage.script = lambda asked: ranged(DAMAGED, asked)
    with pytest.raises(ChecksumMismatchError) as caught:
        source.read(source.stat("model.safetensors"))
    assert str(caught.value.fields["endpoint"]).endswith(f"http://{storage.host}")
    assert_no_secret(caught.value, caplog)


def test_a_manifest_that_a_mirror_damages_comes_from_the_registry(
    make_registry: Make, open_oci: Open, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, registry = make_registry(login=False), make_registry()
    pinned = open_oci(registry).pinned_uri().removeprefix(f"oci://{registry.host}/")
    mirror.script = lambda asked: Answer(200, b"{}") if "/manifests/" in asked.path else None
    source = open_oci(registry, pinned, mirror, oci_mirrors=(f"{registry.host}={mirror.host}",))
    assert read(source) == DATA[1000:2000]
    (warning,) = warnings(caplog)
    assert f"endpoint=http://{mirror.host}" in warning


def test_a_busy_mirror_is_not_asked_for_a_manifest_as_long_as_the_registry_would_be(
    make_registry: Make, open_oci: Open
) -> None:
    mirror, registry = make_registry(login=False), make_registry()
    busy = iter(range(5))
    mirror.script = lambda asked: Answer(429, b"")
    registry.script = lambda asked: None if next(busy, None) is None else Answer(503, b"")
    mirrors = (f"{registry.host}={mirror.host}",)
    source = open_oci(registry, "m:v", mirror, oci_mirrors=mirrors, max_attempts=6)
    assert source.stat("model.safetensors").size_bytes == len(DATA)
    assert mirror.count("/manifests/") == 3
    assert registry.count("/manifests/") == 6


# A mirror that fails in the middle


def test_a_mirror_that_is_gone_in_the_middle(
    mirrored: Mirrored, caplog: pytest.LogCaptureFixture
) -> None:
    """All blobs go on from the registry, and the mirror is not asked again."""
    mirror, _, source = mirrored(auth="bearer")
    assert read(source) == DATA[1000:2000]
    mirror.script = blobs(cut_at_once)
    begin = mirror.count("/blobs/")
    for _ in range(3):
        assert read(source) == DATA[1000:2000]
        assert source.read(source.stat("config.json")) == b"{}"
    assert mirror.count("/blobs/") == begin + 3
    (warning,) = warnings(caplog)
    assert "is used no more" in warning


def test_a_mirror_that_refuses_connections_in_the_middle(
    mirrored: Mirrored, caplog: pytest.LogCaptureFixture
) -> None:
    mirror, registry, source = mirrored()
    assert read(source) == DATA[1000:2000]
    mirror.stop()
    assert read(source, 0, 5000) == DATA[:5000]
    assert source.read(source.stat("config.json")) == b"{}"
    assert len(warnings(caplog)) == 1
    registry.stop()
    with pytest.raises(SourceUnavailableError) as caught:
        read(source)
    assert caught.value.fields["endpoint"] == f"http://{registry.host}"


@pytest.mark.parametrize(
    ("answer", "asked_at_mirror"),
    [
        (Answer(404), 1),
        (Answer(403), 1),
        (Answer(503), 3),
        (Answer(500), 3),
        (Answer(200, DATA), 2),
    ],
)
def test_a_mirror_that_refuses_in_the_middle(
    mirrored: Mirrored,
    caplog: pytest.LogCaptureFixture,
    answer: Answer,
    asked_at_mirror: int,
) -> None:
    """What may pass is asked for again; what does not (404, whole blobs only) is not."""
    mirror, _, source = mirrored(auth="basic")
    mirror.script = blobs(lambda asked: answer)
    for _ in range(2):
        assert read(source) == DATA[1000:2000]
    assert mirror.count("/blobs/") == asked_at_mirror
    assert len(warnings(caplog)) == 1


def test_one_fault_of_a_mirror_changes_nothing(mirrored: Mirrored) -> None:
    mirror, registry, source = mirrored()
    answers = [lambda asked: Answer(503), cut_at_once]
    mirror.script = lambda asked: answers.pop()(asked) if answers else None
    assert read(source) == DATA[1000:2000]
    assert registry.log == []


def test_a_mirror_that_asks_who_it_is_until_the_end(mirrored: Mirrored) -> None:
    """What was tried with the mirror does not count at the registry."""
    mirror, _, source = mirrored(auth="bearer")
    mirror.script = blobs(
        lambda asked: Answer(
            401, headers={"WWW-Authenticate": f'Bearer realm="{mirror.endpoint}/token"'}
        )
    )
    mirror_token = mirror.usual
    mirror.usual = lambda asked: (  # type: ignore[method-assign]
        Answer(200, b'{"token": "x"}') if asked.path == "/token" else mirror_token(asked)
    )
    assert read(source) == DATA[1000:2000]


def test_the_store_of_a_mirror_that_is_gone(mirrored: Mirrored, storage: ScriptedStorage) -> None:
    mirror, registry, source = mirrored()
    mirror.storage = storage
    assert read(source) == DATA[1000:2000]
    storage.stop()
    assert read(source) == DATA[1000:2000]
    assert registry.count("/blobs/") == 1


def test_two_mirrors(make_registry: Make, open_oci: Open) -> None:
    first, second, registry = (make_registry() for _ in range(3))
    mirrors = tuple(f"{registry.host}={one.host}" for one in (first, second))
    source = open_oci(registry, "m:v", first, second, oci_mirrors=mirrors)
    assert read(source) == DATA[1000:2000]
    first.stop()
    assert read(source) == DATA[1000:2000]
    assert second.count("/blobs/") == 1
    assert registry.log == []
    second.script = blobs(lambda asked: Answer(404))
    assert read(source) == DATA[1000:2000]
    assert registry.count("/blobs/") == 1
    registry.script = blobs(lambda asked: Answer(404))
    with pytest.raises(ObjectMissingError) as caught:
        read(source)
    assert caught.value.fields["endpoint"] == f"http://{registry.host}"


# The rule


def test_a_mirror_that_cuts_every_reply_is_left_before_the_attempts_end() -> None:
    places = [Place(name, Endpoint(name, 443, True), "m", "r") for name in "ab"]
    choice = PlaceChoice("oci://r/m:v", places, max_attempts=5)
    error = SourceUnavailableError("cut")
    error.received_bytes = 1000
    for _ in range(3):
        assert not choice.failed(places[0], "sha256:a", 100, error)
    error.received_bytes = MIB
    assert not choice.failed(places[0], "sha256:a", 100, error)  # no attempt is used up
    error.received_bytes = 1
    assert choice.failed(places[0], "sha256:a", 100, error)
    assert choice.place("sha256:b") == places[1]


def test_choices_only_move_on() -> None:
    places = [Place(name, Endpoint(name, 443, True), "m", "r") for name in "abc"]
    choice = PlaceChoice("oci://r/m:v", places, 8)
    a, b, c = places
    passing, lasting = SourceUnavailableError("x"), ObjectMissingError("y")
    partly = SourceUnavailableError("z")
    partly.received_bytes = 5
    # Faults of several ranges are not one mirror's end; those of one are.
    assert [choice.failed(a, "1", end, passing) for end in (10, 20, 30, 10, 20)] == [False] * 5
    assert [choice.failed(a, "1", 10, partly) for _ in range(5)] == [False] * 5
    assert not choice.failed(a, "1", 40, passing)
    assert choice.place("1") == a
    assert choice.failed(a, "1", 10, passing)
    assert (choice.place("1"), choice.place("2")) == (b, b)
    # Requests that were in flight there ask the next one at once, and count for nobody.
    assert choice.failed(a, "2", 10, passing)
    assert choice.place("2") == b
    # What is missing at one place is missing there only.
    assert choice.failed(b, "2", 10, lasting)
    assert (choice.place("1"), choice.place("2")) == (b, c)
    assert not choice.failed(c, "2", 10, lasting)
    assert not choice.failed(c, "2", 10, passing)
    assert not choice.give_up(c, "2", lasting)
    assert choice.give_up(a, "1", lasting)  # already elsewhere
    assert choice.place("1") == b


@pytest.mark.parametrize("max_attempts", [1, 2, 3, 10])
def test_the_last_attempt_is_for_another_place(max_attempts: int) -> None:
    places = [Place(name, Endpoint(name, 443, True), "m", "r") for name in "ab"]
    choice = PlaceChoice("oci://r/m:v", places, max_attempts)
    error = SourceUnavailableError("x")
    results = [choice.failed(places[0], "1", 10, error) for _ in range(min(max_attempts, 3))]
    assert results[-1]
    assert not any(results[:-1])


# A registry without ranges


def test_a_whole_file_cut_by_a_registry_without_ranges_is_asked_for_anew(
    without_ranges: tuple[ScriptedRegistry, OciSource],
) -> None:
    registry, source = without_ranges
    object_id = source.stat("model.safetensors")
    answers = [Answer(200, DATA, cut_bytes=cut) for cut in (9_000, 5_000)]
    registry.script = lambda asked: (
        answers.pop() if answers and asked.headers.get("range", "").startswith("bytes=0-") else None
    )
    assert source.read(object_id) == DATA
    assert not answers


def test_a_registry_without_ranges_that_cuts_every_reply(
    without_ranges: tuple[ScriptedRegistry, OciSource],
) -> None:
    registry, source = without_ranges
    object_id = source.stat("model.safetensors")
    registry.script = blobs(lambda asked: Answer(200, DATA, cut_bytes=9_000))
    with pytest.raises(SourceUnavailableError, match="does not honour Range") as caught:
        source.read(object_id)
    assert f"9000 of {len(DATA)} bytes" in str(caught.value)
    assert "fastload pull" in str(caught.value)
    assert caught.value.fields["attempts"] == 3
    assert caught.value.fields["endpoint"] == f"http://{registry.host}"
    assert registry.count("/blobs/") <= 5


def test_a_part_of_a_file_from_a_registry_without_ranges(
    without_ranges: tuple[ScriptedRegistry, OciSource],
) -> None:
    _, source = without_ranges
    with pytest.raises(RangeMismatchError, match="does not honour Range"):
        source.read(source.stat("model.safetensors"), ByteRange(0, 10))
