"""What is wrong with replies: refusals, broken bodies, other ranges, other states of the object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastload_common.errors import (
    DeadlineError,
    FastloadError,
    ObjectChangedError,
    RangeMismatchError,
)
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.ranges import ByteRange
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import (
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    Chunked,
    ContentRange,
    Effect,
    Error,
    Etag,
    Fault,
    Generated,
    Headers,
    IgnoreRange,
    LoggedRequest,
    Rate,
    Reset,
    Rig,
    Short,
    Shorter,
    Stall,
    Status,
    Unframed,
)
from tests.cases.harness import (
    BUCKET,
    MODEL,
    SHARDS,
    URI,
    load,
    load_in,
    make_model,
    ranges,
    settings,
)

FIRST = MODEL.files[SHARDS[0]]
KEY = f"m/{SHARDS[0]}"
# Behind what is read for the header; a range of a load, whatever its chunks are.
INSIDE = ByteRange(300_000, 300_001)
OTHER = make_model(seed=1)


def inside(
    effect: Effect, attempts: tuple[int, ...] | None = None, at: ByteRange = INSIDE
) -> Fault:
    """Harm for the one range of the first shard that holds these bytes."""
    return Fault(effect, name=f"{BUCKET}/{KEY}", byte_range=at, attempts=attempts)


def asked_inside(rig: Rig, at: ByteRange = INSIDE) -> list[LoggedRequest]:
    """All requests for bytes of the range that was harmed."""
    first = next(request for request in rig.log.gets(KEY) if request.overlaps(at))
    assert first.byte_range is not None
    return [request for request in rig.log.gets(KEY) if request.overlaps(first.byte_range)]


# S15


def test_s15_a_store_that_refuses_a_third_for_a_while(rig: Rig) -> None:
    rig.faults = [
        inside(INTERNAL_ERROR, (1,), ByteRange(400_000, 400_001)),
        inside(TOO_MANY_REQUESTS, (1,), ByteRange(500_000, 500_001)),
        inside(Error(503, "SlowDown", retry_after_s=1), (1,)),
        Fault(SLOW_DOWN, share=0.3, seed=1, methods=("GET", "LIST"), attempts=(1, 2)),
    ]
    with LoadSession([WeightSource(URI)], settings(concurrency=16, max_attempts=10)) as session:
        assert MODEL.agrees(load_in(session))
    refused = [request for request in rig.log.gets() if request.status >= 400]
    assert {request.status for request in refused} == {429, 500, 503}
    served = [request for request in rig.log.gets() if request.status == 206]
    # Refused ones are asked again, and nothing else is.
    assert len(rig.log.gets()) == len(refused) + len(served)
    first, *later = asked_inside(rig)
    assert min(request.arrived_s for request in later) - first.arrived_s >= 1.0


def test_s15_for_ever_ends_inside_the_time_budget_and_says_why(rig: Rig) -> None:
    rig.faults = [Fault(SLOW_DOWN, byte_range=ByteRange(200_000, 1_000_000))]
    limit_s = 4.0
    with pytest.raises(FastloadError, match="SlowDown") as caught:
        load(with_=settings(concurrency=64, max_attempts=1000, deadline_s=limit_s))
    assert isinstance(caught.value, DeadlineError)
    refused = [request for request in rig.log.gets() if request.status == 503]
    # Far below what 64 connections could ask in that time.
    assert len(refused) < 50 * limit_s
    assert max(request.arrived_s for request in refused) - refused[0].arrived_s < limit_s


# S16


@pytest.fixture(params=["http", "https"])
def any_rig(
    request: pytest.FixtureRequest, authority: PrivateAuthority, monkeypatch: pytest.MonkeyPatch
) -> Rig:
    if request.param == "http":
        found: Rig = request.getfixturevalue("rig")
    else:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
        found = request.getfixturevalue("tls_rig")
    return found


@pytest.mark.parametrize(
    "harm",
    [
        Reset(after_share=0.4),
        Reset(after_bytes=0),
        Reset(after_bytes=None),
        Reset(after_bytes=-1),
        Short(after_share=0.7, close_notify=False),
        Short(after_share=0.7),
    ],
)
def test_s16_s18_a_body_that_breaks_off_is_continued(any_rig: Rig, harm: Effect) -> None:
    any_rig.faults = [Fault(harm, share=0.4, seed=4, attempts=(1,))]
    with ranges() as read:
        object_id = read.source.stat(SHARDS[0])
        assert read.read(object_id) == FIRST
    assert any_rig.log.bytes_sent < 1.3 * len(FIRST)
    gets = any_rig.log.gets()
    assert {request.headers["if-match"] for request in gets} == {object_id.etag}
    assert any(type(harm).__name__ in request.faults for request in gets)
    for request in gets:
        if request.attempt > 1:
            # Only what is missing: no chunk from its start, unless nothing had come.
            first = next(r for r in gets if r.byte_range and request.overlaps(r.byte_range))
            assert request.byte_range is not None
            assert first.byte_range is not None
            assert request.byte_range.start == first.byte_range.start + first.sent_bytes


def test_s16_attempts_for_a_range_are_bounded(rig: Rig) -> None:
    rig.faults = [inside(Reset(after_bytes=0))]
    with pytest.raises(FastloadError, match=r"closed or reset.*attempts=4"):
        load()
    assert len(asked_inside(rig)) == 4


# S18


QUICK = settings(read_timeout_s=0.5, max_attempts=6)


@pytest.mark.parametrize(
    ("harm", "times"),
    [
        pytest.param((Short(after_share=0.5),), 1, id="a: FIN before Content-Length"),
        pytest.param((Shorter(100),), 1, id="b: Content-Length smaller than the range"),
        pytest.param((Chunked(), Shorter(100)), 1, id="c: chunked and short"),
        pytest.param((Unframed(), Shorter(100)), 1, id="c: no length and short"),
        pytest.param((Stall(after_bytes=0),), 1, id="d: a head, then silence"),
        pytest.param((Stall(after_bytes=None),), 2, id="d: silence before the head"),
        pytest.param((Rate(1),), 1, id="e: one byte a second"),
    ],
)
def test_s18_short_and_silent_bodies_are_found_out(
    rig: Rig, harm: tuple[Effect, ...], times: int
) -> None:
    attempts = tuple(range(1, times + 1))
    rig.faults = [inside(effect, attempts) for effect in harm]
    with ranges(with_=QUICK) as read:
        assert read.read(read.source.stat(SHARDS[0])) == FIRST
    asked = asked_inside(rig)
    assert len(asked) > times
    assert asked[-1].connection != asked[0].connection


def test_s18_nothing_waits_for_what_never_comes(rig: Rig) -> None:
    rig.faults = [inside(Stall(after_bytes=1000))]
    with pytest.raises(FastloadError, match=SHARDS[0]):
        load(with_=replace(QUICK, max_attempts=2))
    rig.log.wait_until_unconnected()


def test_s18_a_consumer_that_pauses_holds_no_request_open(rig: Rig) -> None:
    with ranges() as read:
        object_id = read.source.stat(SHARDS[0])
        held = []
        running = read.fetcher.fetch(read.chunks(object_id))
        for _ in range(4):  # all memory there is
            held.append(next(running))
        rig.log.wait_until_idle()
        # Minutes later the server has closed what was idle.
        rig.drop_connections()
        rig.log.wait_for(lambda: rig.log.open_connections == 0)
        found = bytearray(len(FIRST))
        for filled in _rest(held, running):
            place = filled.chunk.byte_range
            found[place.start : place.end] = filled.data
            filled.release()
        assert bytes(found) == FIRST
        assert read.stats.snapshot()["errors"] == {}


def _rest(held: list, running: Iterator) -> Iterator:  # type: ignore[type-arg]
    yield from held
    yield from running


# S19


NOT_HONOURED = "does not honour Range"


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        pytest.param((IgnoreRange(),), RangeMismatchError, NOT_HONOURED, id="200 full body"),
        pytest.param(
            (ContentRange(shift_bytes=7),), RangeMismatchError, "another range", id="206 shifted"
        ),
        pytest.param(
            (ContentRange(total_more_bytes=1),), ObjectChangedError, "another size", id="206 total"
        ),
        pytest.param(
            (Headers({"content-range": None}),), RangeMismatchError, "which range", id="206 bare"
        ),
        pytest.param(
            (Status(200), Headers({"content-range": None})),
            RangeMismatchError,
            NOT_HONOURED,
            id="200 with the right part, unsaid",
        ),
    ],
)
def test_s19_what_is_not_the_range_is_never_data(
    rig: Rig, harm: tuple[Effect, ...], error: type[FastloadError], words: str
) -> None:
    rig.faults = [inside(effect) for effect in harm]
    with pytest.raises(error, match=words) as caught:
        load()
    assert isinstance(caught.value, FastloadError)
    assert not caught.value.retryable
    assert len(asked_inside(rig)) <= 2


def test_s19_the_whole_object_is_not_taken_in(rig: Rig) -> None:
    size_bytes = 256 * 1024 * 1024
    rig.put(BUCKET, "m/large", Generated(size_bytes))
    rig.faults = [Fault(IgnoreRange())]
    with ranges() as read:
        object_id = read.source.stat("large")
        with pytest.raises(RangeMismatchError, match=NOT_HONOURED):
            read.read(object_id)
    # What was on its way when the connection was closed, in the buffers of both ends.
    assert max(request.sent_bytes for request in rig.log.gets()) < size_bytes / 8


def test_s19_once_is_chance(rig: Rig) -> None:
    rig.faults = [Fault(ContentRange(shift_bytes=7), attempts=(1,), share=0.3, seed=1)]
    assert MODEL.agrees(load())


def test_s19_200_with_the_right_content_range_is_taken(rig: Rig) -> None:
    rig.faults = [Fault(Status(200))]
    assert MODEL.agrees(load())


def test_s19_200_for_all_of_an_object_is_taken(rig: Rig) -> None:
    rig.put(BUCKET, "m/small", b"0123456789")
    rig.faults = [Fault(IgnoreRange())]
    with ranges() as read:
        object_id = read.source.stat("small")
        assert read.read(object_id) == b"0123456789"
        assert read.source.read(object_id) == b"0123456789"
    assert {request.status for request in rig.log.gets()} == {200}
    assert rig.log.gets()[0].headers["range"] == "bytes=0-9"


# S21


def _overwrite_after_the_headers(rig: Rig, change: str) -> list[str]:
    """Load, with the first shard overwritten once its header was read; what the error says."""
    with LoadSession([WeightSource(URI)], settings()) as session:
        if change == "deleted":
            rig.store.delete(BUCKET, f"m/{SHARDS[0]}")
        elif change == "smaller":
            rig.put(BUCKET, f"m/{SHARDS[0]}", OTHER.files[SHARDS[0]][:250_000])
        elif change == "multipart":
            rig.put(BUCKET, f"m/{SHARDS[0]}", OTHER.files[SHARDS[0]], etag='"abc-7"')
        else:
            rig.put(BUCKET, f"m/{SHARDS[0]}", OTHER.files[SHARDS[0]])
        with pytest.raises(ObjectChangedError) as caught:
            load_in(session)
    fields = caught.value.fields
    assert fields["uri"] == f"{URI}/{SHARDS[0]}"
    return [str(caught.value), fields["expected_etag"], fields["found_etag"]]


@pytest.mark.parametrize("change", ["same size", "smaller", "deleted", "multipart", "versioned"])
def test_s21_an_object_that_changes_ends_the_load(rig: Rig, change: str) -> None:
    if change == "versioned":
        rig.store.versioned.add(BUCKET)
        MODEL.put(rig)
    old = rig.store.objects(BUCKET)[f"m/{SHARDS[0]}"].etag
    text, expected, found = _overwrite_after_the_headers(rig, change)
    now = rig.store.objects(BUCKET).get(f"m/{SHARDS[0]}")
    assert expected == old
    assert found == ("none" if now is None else now.etag)
    assert "replaced or deleted" in text
    assert {r.headers.get("if-match") is not None for r in rig.log.gets()} == {True}


def test_s21_a_multipart_etag_is_pinned_like_any_other(rig: Rig) -> None:
    rig.put(BUCKET, f"m/{SHARDS[0]}", FIRST, etag='"d41d8cd98f00b204e9800998ecf8427e-7"')
    assert MODEL.agrees(load())


def test_s21_a_front_that_serves_the_old_state_is_found_out(rig: Rig) -> None:
    # A cache that heeds no If-Match, in front of an object that was replaced: listed is the new
    # state, served is the old one with its ETag.
    old = '"11111111111111111111111111111111"'
    rig.faults = [inside(Etag(old))]
    with pytest.raises(ObjectChangedError) as caught:
        load()
    assert caught.value.fields["found_etag"] == old
    assert caught.value.fields["expected_etag"] == rig.store.objects(BUCKET)[f"m/{SHARDS[0]}"].etag


def test_s21_a_front_that_mixes_states_is_found_out(rig: Rig) -> None:
    # The header comes from the new object, some ranges from the old one.
    rig.faults = [Fault(Etag('"old"'), share=0.3, seed=5)]
    with pytest.raises(ObjectChangedError):
        load()
