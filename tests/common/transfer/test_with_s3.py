"""The fetcher over the real S3 source: against the real server, and against silence."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.errors import ObjectChangedError, SourceUnavailableError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.testing.s3_server import S3Server
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.stats import TransferStats
from tests.common.transfer.transfer_bench import receiving_threads

CHUNK_BYTES = 256 * 1024
SETTINGS = Settings(concurrency=6, chunk_bytes=CHUNK_BYTES, max_attempts=2)


def chunks_of(object_id: ObjectId) -> list[Chunk]:
    edges = range(0, object_id.size_bytes, CHUNK_BYTES)
    return [
        Chunk(object_id, ByteRange(start, min(start + CHUNK_BYTES, object_id.size_bytes)), 1)
        for start in edges
    ]


class Loader:
    def __init__(self, source: ObjectSource) -> None:
        self.arena = Arena(CHUNK_BYTES, 4)
        self.stats = TransferStats()
        policy = TransferPolicy(6, 2, SETTINGS.connect_timeout_s, SETTINGS.read_timeout_s)
        self.fetcher = Fetcher(source, self.arena, policy, SystemClock(), self.stats)

    def read(self, object_id: ObjectId) -> bytes:
        found = bytearray(object_id.size_bytes)
        for filled in self.fetcher.fetch(chunks_of(object_id)):
            place = filled.chunk.byte_range
            found[place.start : place.end] = filled.data
            filled.release()
        return bytes(found)


@contextlib.contextmanager
def loader(source: ObjectSource) -> Iterator[Loader]:
    made = Loader(source)
    yield made
    made.fetcher.close()
    assert made.arena.leased_count == 0
    assert receiving_threads() == []
    made.arena.close()
    source.close()


@pytest.mark.s3
def test_every_byte_comes_over_few_connections(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path
) -> None:
    data = random.Random(5).randbytes(20 * CHUNK_BYTES + 12_345)
    (tmp_path / "model.bin").write_bytes(data)
    s3_server.upload_dir(tmp_path, s3_bucket, "m")
    source = open_source(f"s3://{s3_bucket}/m", SETTINGS)
    object_id = source.stat("model.bin")
    with loader(source) as made:
        assert made.read(object_id) == data
        assert made.read(object_id) == data
        found = made.stats.snapshot()
    assert found["requests"] == 2 * 21
    assert found["bytes_received"] == 2 * len(data)
    assert found["new_connections"] <= SETTINGS.concurrency
    assert found["errors"] == {}
    assert made.arena.peak_leased_bytes <= 4 * CHUNK_BYTES


@pytest.mark.s3
def test_s21_an_object_that_is_replaced_meanwhile_is_never_mixed(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path
) -> None:
    (tmp_path / "model.bin").write_bytes(b"old" * CHUNK_BYTES)
    s3_server.upload_dir(tmp_path, s3_bucket, "m")
    source = open_source(f"s3://{s3_bucket}/m", SETTINGS)
    object_id = source.stat("model.bin")
    with loader(source) as made:
        running = made.fetcher.fetch(chunks_of(object_id) * 3)
        next(running).release()
        (tmp_path / "model.bin").write_bytes(b"new" * CHUNK_BYTES)
        s3_server.upload_dir(tmp_path, s3_bucket, "m")

        def place_the_rest() -> None:
            for filled in running:
                assert bytes(filled.data[:3]) in (b"old", b"ldo", b"dol")
                filled.release()

        with pytest.raises(ObjectChangedError, match=r"model\.bin"):
            place_the_rest()


def test_a_server_that_never_answers_is_left_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        source = open_source("s3://bucket/m", SETTINGS)
        object_id = ObjectId("s3://bucket/m/model.bin", '"e"', 20 * CHUNK_BYTES)
        with loader(source) as made:
            errors: list[BaseException] = []

            def consume() -> None:
                try:
                    made.read(object_id)
                except BaseException as error:
                    errors.append(error)

            consumer = threading.Thread(target=consume)
            consumer.start()
            peers = [silent.accept()[0] for _ in range(4)]  # one for each slot
            began_s = time.monotonic()
            made.fetcher.close()
            consumer.join(10)
            assert time.monotonic() - began_s < 10  # not as long as the stall
            assert [str(error) for error in errors] == [
                "the fetcher was closed while chunks were fetched"
            ]
            for peer in peers:
                peer.settimeout(10)
                while peer.recv(65536):
                    pass  # the request, then the end of the connection
                peer.close()


def test_a_refused_connection_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    source = open_source("s3://bucket/m", SETTINGS)
    object_id = ObjectId("s3://bucket/m/model.bin", '"e"', 20 * CHUNK_BYTES)
    with (
        loader(source) as made,
        pytest.raises(SourceUnavailableError, match=r"refused.*attempts=2") as caught,
    ):
        made.read(object_id)
    assert "s3://bucket/m/model.bin" in str(caught.value)
