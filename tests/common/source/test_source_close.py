"""What a closed source leaves open: nothing, whatever ends after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fastload_common.errors import FastloadError, ObjectChangedError, ObjectMissingError
from fastload_common.ranges import ByteRange
from fastload_common.source.base import Refusal
from fastload_common.testing.rig import Rig
from tests.common.source.conftest import OpenS3

RANGE = ByteRange(0, 5)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with Rig() as rig:
        for name, value in rig.environ().items():
            monkeypatch.setenv(name, value)
        rig.put("bucket", "m/key", b"12345")
        yield rig


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What is left must not wait for the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_an_error_that_is_kept_keeps_no_connection(rig: Rig, open_s3: OpenS3) -> None:
    source = open_s3("s3://bucket/m")
    kept: list[FastloadError] = []
    with pytest.raises(ObjectMissingError) as caught:
        source.stat("nothing")
    kept.append(caught.value)
    assert rig.log.open_connections == 1
    source.close()
    rig.log.wait_until_unconnected(5.0)
    assert kept[0].__context__ is None


@pytest.mark.usefixtures("no_collection")
def test_a_refusal_that_is_judged_after_the_close_opens_nothing(rig: Rig, open_s3: OpenS3) -> None:
    source = open_s3("s3://bucket/m")
    object_id = source.stat("key")
    reads = source.remote_reads(object_id)
    assert reads is not None
    signed = reads.sign(object_id, RANGE)
    source.close()
    rig.log.wait_until_unconnected(5.0)
    connections = rig.log.connections
    for status in (412, 301):
        error = signed.judge(Refusal(status, {}, b""), set())
        assert error is not None
        assert not error.retryable
    assert rig.log.connections == connections


@pytest.mark.usefixtures("no_collection")
def test_a_refusal_that_is_judged_while_the_source_closes_leaves_nothing(
    rig: Rig, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_s3("s3://bucket/m")
    object_id = source.stat("key")
    reads = source.remote_reads(object_id)
    assert reads is not None
    signed = reads.sign(object_id, RANGE)
    session = source._session
    really_call = session.call

    def close_first(*args: str, **parameters: str) -> object:
        source.close()
        return really_call(*args, **parameters)

    monkeypatch.setattr(session, "call", close_first)
    error = signed.judge(Refusal(412, {}, b""), set())
    assert isinstance(error, ObjectChangedError)
    assert error.fields["found_etag"] == object_id.etag
    rig.log.wait_until_unconnected(5.0)
