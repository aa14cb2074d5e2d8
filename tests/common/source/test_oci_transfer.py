"""Layers through the transfer: receiver processes, a real registry, and a storm of faults."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.clock import SystemClock
from fastload_common.config import Settings, load_settings
from fastload_common.errors import AccessDeniedError, ObjectMissingError, SourceError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.oci import OciSource
from fastload_common.source.oci_reference import parse_reference
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.registry_server import (
    FILEPATH,
    RegistryServer,
    missing_programs,
)
from fastload_common.testing.scripted_registry import Answer, Asked, ScriptedRegistry, ranged
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.stats import TransferStats
from tests.common.source.oci_bench import NAMED, RAW, Make

CHUNK_BYTES = 64 * 1024
DATA = random.Random(7).randbytes(40 * CHUNK_BYTES + 4321)
needs_registry = pytest.mark.skipif(bool(missing_programs()), reason=missing_programs() or "-")


def fetch(
    source: ObjectSource,
    object_ids: list[ObjectId],
    attempts: int = 8,
    after: dict[int, Callable[[], None]] | None = None,
) -> tuple[list[bytes], dict[str, Any]]:
    """Whole objects, by ranges, in receiver processes.

    Args:
        after: what is to happen when so many ranges have come.
    """
    arena, stats = Arena(CHUNK_BYTES, 8), TransferStats()
    fetcher = Fetcher(source, arena, TransferPolicy(6, attempts, 5.0, 5.0), SystemClock(), stats)
    found = {one: bytearray(one.size_bytes) for one in object_ids}
    chunks = [
        Chunk(one, piece, 1)
        for one in object_ids
        for piece in ByteRange(0, one.size_bytes).pieces(CHUNK_BYTES)
    ]
    try:
        for count, filled in enumerate(fetcher.fetch(chunks)):
            if after and count in after:
                after[count]()
            place = filled.chunk.byte_range
            found[filled.chunk.object_id][place.start : place.end] = filled.data
            filled.release()
    finally:
        fetcher.close()
        arena.close()
    return [bytes(found[one]) for one in object_ids], stats.snapshot()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    """Debian's registry: basic auth over TLS."""
    with RegistryServer(PrivateAuthority(tmp_path_factory.mktemp("authority"))) as server:
        yield server


@pytest.fixture
def settings(real: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in real.environ().items():
        monkeypatch.setenv(name, value)
    return load_settings({"max_attempts": 3})


def archive(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return out.getvalue()


@needs_registry
def test_raw_and_tar_layers_of_a_real_registry(real: RegistryServer, settings: Settings) -> None:
    """Every byte, over kept connections, and little else."""
    layers = [
        real.push_blob("m", DATA, RAW, {FILEPATH: "model.safetensors"}),
        real.push_blob(
            "m",
            archive(("config.json", b"{}"), ("sub/more.safetensors", DATA[::-1]), ("x", b"x")),
            "application/vnd.cncf.model.weight.v1.tar",
        ),
    ]
    digest = real.push_manifest("m", "v", layers)
    begin = len(real.log_text())
    with contextlib.closing(open_source(f"oci://{real.host}/m:v", settings)) as source:
        listed = {row.key: row.object_id for row in source.list()}
        assert list(listed) == ["config.json", "model.safetensors", "sub/more.safetensors", "x"]
        found, stats = fetch(source, [listed["model.safetensors"], listed["sub/more.safetensors"]])
        assert found == [DATA, DATA[::-1]]
        assert source.read(listed["config.json"]) == b"{}"
        facts = source.describe().facts
    assert facts["digest"] == digest
    assert stats["errors"] == {}
    served = real.requests(begin)
    assert sum(one.body_bytes for one in served) <= 1.01 * 2 * len(DATA)
    # Once it is known who asks, nobody is asked again.
    assert [one.status for one in served].count(401) == 1
    assert stats["new_connections"] <= 6


@needs_registry
def test_images_that_umoci_and_skopeo_make(
    real: RegistryServer, settings: Settings, tmp_path: Path
) -> None:
    """Two layers, the second one over the first; plain tar is read, gzip is not."""
    if lacks := missing_programs("umoci", "skopeo"):
        pytest.skip(lacks)
    layout, first, second = (tmp_path / name for name in ("layout", "first", "second"))
    first.mkdir()
    second.mkdir()
    (first / "model.safetensors").write_bytes(DATA)
    (first / "gone.txt").write_text("old")
    (first / "config.json").write_text("{}")
    os.symlink("model.safetensors", first / "link.safetensors")
    (second / "config.json").write_text('{"new": 1}')
    image = f"{layout}:v"
    real.run("umoci", "init", "--layout", str(layout))
    real.run("umoci", "new", "--image", image)
    for folder in (first, second):
        real.run("umoci", "insert", "--rootless", "--image", image, str(folder), "/models")
    real.run("umoci", "insert", "--image", image, "--whiteout", "/models/gone.txt")
    real.push_image(layout, "image/plain", "v", decompress=True)
    real.push_image(layout, "image/gzip", "v")
    uri = f"oci://{real.host}/image/plain:v/models"
    with contextlib.closing(open_source(uri, settings)) as source:
        listed = {row.key: row.object_id for row in source.list()}
        assert list(listed) == ["config.json", "link.safetensors", "model.safetensors"]
        assert source.read(listed["config.json"]) == b'{"new": 1}'
        assert fetch(source, [listed["model.safetensors"]])[0] == [DATA]
    gzip = open_source(f"oci://{real.host}/image/gzip:v", settings)
    with contextlib.closing(gzip), pytest.raises(SourceError, match="fastload pull oci://"):
        gzip.list()


@needs_registry
def test_what_a_real_registry_refuses(
    real: RegistryServer, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real.push_manifest("m", "there", [])
    for name, kind in (("m:absent", ObjectMissingError), ("absent/m:v", ObjectMissingError)):
        source = open_source(f"oci://{real.host}/{name}", settings)
        with contextlib.closing(source), pytest.raises(kind, match=name):
            source.list()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    source = open_source(f"oci://{real.host}/m:there", settings)
    with contextlib.closing(source), pytest.raises(AccessDeniedError, match="docker login"):
        source.list()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(PrivateAuthority(tmp_path).bundle))
    source = open_source(f"oci://{real.host}/m:there", settings)
    with contextlib.closing(source), pytest.raises(SourceError, match="certificate verify failed"):
        source.list()


@needs_registry
def test_a_real_mirror_that_is_ended_in_the_middle(
    real: RegistryServer, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with RegistryServer(None, auth=False) as mirror:
        for one in (mirror, real):
            layer = one.push_blob("m", DATA, RAW, {FILEPATH: "model.safetensors"})
            one.push_manifest("m", "mirrored", [layer])
        begin = len(real.log_text())
        places = {"oci_mirrors": f"{real.host}={mirror.host}", "oci_plain_http": mirror.host}
        source = open_source(
            f"oci://{real.host}/m:mirrored", load_settings({"max_attempts": 3} | places)
        )
        with contextlib.closing(source):
            object_id = source.stat("model.safetensors")
            assert real.requests(begin) == []
            found, _ = fetch(source, [object_id], after={4: mirror.stop})
    assert found == [DATA]
    served = real.requests(begin)
    # Some of it; a request that looks slow on a busy machine may be raced.
    assert 0 < sum(one.body_bytes for one in served if one.status == 206) < 1.5 * len(DATA)
    assert sum("the mirror" in one for one in caplog.messages) == 1


@needs_registry
def test_a_source_may_be_sent_to_another_process(real: RegistryServer, settings: Settings) -> None:
    real.push_manifest("m", "p", [real.push_blob("m", b"data", RAW, {FILEPATH: "x"})])
    source = OciSource(parse_reference(f"oci://{real.host}/m:p"), settings)
    object_id = source.stat("x")
    copy = pickle.loads(pickle.dumps(source))
    assert copy.read(copy.stat("x")) == b"data"
    if (child := os.fork()) == 0:
        os._exit(0 if source.read(object_id) == b"data" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.read(object_id) == b"data"
    copy.close()
    source.close()
    assert source.read(object_id) == b"data"  # usable after it was closed
    source.close()


# Faults, over the scripted registry


@contextlib.contextmanager
def opened(registry: ScriptedRegistry, *mirrors: ScriptedRegistry) -> Iterator[OciSource]:
    hosts = (registry.host, *(one.host for one in mirrors))
    reference = parse_reference(f"oci://{registry.host}/m:big")
    named = tuple(f"{registry.host}={one.host}" for one in mirrors)
    settings = Settings(max_attempts=8, oci_plain_http=hosts, oci_mirrors=named or None)
    source = OciSource(reference, settings)
    with contextlib.closing(source):
        yield source


def test_tokens_and_urls_may_end_in_the_middle_of_a_load(make_registry: Make, storage: Any) -> None:
    registry = make_registry(auth="bearer")
    registry.artifact("big", [registry.put(DATA, RAW, NAMED)])
    registry.storage = storage
    storage.stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    served = []

    def end_some(asked: Asked) -> Answer | None:
        served.append(asked)
        if len(served) % 25 == 0:
            storage.ended.update(storage.signatures)
            registry.ended.update(registry.tokens)
        return None

    storage.script = end_some
    with opened(registry) as source:
        found, stats = fetch(source, [source.stat("model.safetensors")])
    assert found == [DATA]
    assert len(storage.signatures) >= 2
    assert len(registry.tokens) >= 2
    assert stats["errors"] == {}  # told apart from faults: they cost no attempt
    assert {asked.authorization for asked in storage.log} == {None}


def test_a_storm_of_faults_changes_no_byte(make_registry: Make, storage: Any) -> None:
    """About every third reply is wrong, in one of nine ways; what looks permanent only once."""
    registry = make_registry(auth="bearer")
    registry.artifact("big", [registry.put(DATA, RAW, NAMED)])
    registry.storage = storage
    registry.url_life_s = 30
    storage.stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    chance = random.Random(3)
    made: set[tuple[str, str]] = set()

    def storm(asked: Asked) -> Answer | None:
        good = ranged(DATA, asked)
        if chance.random() > 0.35 or not asked.path.startswith("/store/"):
            return None
        head = dict(good.headers)
        passing = [
            Answer(503, headers={"Retry-After": "0"}),
            Answer(500),
            Answer(429),
            Answer(206, good.body, head, cut_bytes=len(good.body) // 3),
            Answer(206, good.body, head, cut_bytes=0),
        ]
        lasting = {
            "refused": Answer(403, b"expired"),
            "reply": Answer(200, DATA)
            if chance.random() < 0.3
            else Answer(206, good.body, {"Content-Range": f"bytes 1-2/{len(DATA)}"})
            if chance.random() < 0.5
            else Answer(206, good.body[:-1], head),
        }
        what = (chance.choice(list(lasting)), asked.headers["range"])
        if chance.random() < 0.5 and what not in made:
            made.add(what)
            return lasting[what[0]]
        return chance.choice(passing)

    def disturb(asked: Asked) -> Answer | None:
        is_blob = "/blobs/" in asked.path
        return Answer(503) if is_blob and chance.random() < 0.2 else None

    storage.script, registry.script = storm, disturb
    with opened(registry) as source:
        found, stats = fetch(source, [source.stat("model.safetensors")], attempts=30)
    assert found == [DATA]
    assert stats["errors"]
    assert {what for what, _ in made} == {"refused", "reply"}


def stops(mirror: ScriptedRegistry) -> Callable[[Asked], Answer]:
    """The mirror's end as a process: its connections end, new ones are refused."""
    ended = threading.Event()

    def answer(asked: Asked) -> Answer:
        if not ended.is_set():
            ended.set()
            threading.Thread(target=mirror.stop).start()
        return Answer(206, b"x" * CHUNK_BYTES, cut_bytes=0)

    return answer


ENDS: dict[str, Callable[[ScriptedRegistry], Callable[[Asked], Answer]]] = {
    "connections refused": stops,
    "500": lambda mirror: lambda asked: Answer(500),
    "404": lambda mirror: lambda asked: Answer(404),
    "no ranges": lambda mirror: lambda asked: Answer(200, DATA),
    "no bytes": lambda mirror: (
        lambda asked: Answer(
            206, ranged(DATA, asked).body, ranged(DATA, asked).headers, cut_bytes=0
        )
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_mirror_that_ends_in_a_storm_ends_no_load(
    make_registry: Make, storage: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Receiver processes go on from the registry, whose URLs and tokens end meanwhile."""
    mirror, registry = make_registry(login=False), make_registry(auth="bearer")
    for one in (mirror, registry):
        one.artifact("big", [one.put(DATA, RAW, NAMED)])
    registry.storage = storage
    storage.stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    chance, lock = random.Random(5), threading.Lock()
    at_mirror: list[Asked] = []
    at_store: list[Asked] = []
    end = ENDS[how](mirror)

    def fail(asked: Asked) -> Answer | None:
        if "/blobs/" not in asked.path:
            return None
        with lock:
            at_mirror.append(asked)
            if len(at_mirror) > 15:
                return end(asked)
            good = ranged(DATA, asked)
            if chance.random() > 0.3:
                return None
        return chance.choice(
            [Answer(503), Answer(206, good.body, good.headers, cut_bytes=len(good.body) // 2)]
        )

    def disturb(asked: Asked) -> Answer | None:
        with lock:
            at_store.append(asked)
            if len(at_store) % 12 == 0:
                storage.ended.update(storage.signatures)
                registry.ended.update(registry.tokens)
            return Answer(500) if chance.random() < 0.1 else None

    mirror.script, storage.script = fail, disturb
    with opened(registry, mirror) as source:
        found, _ = fetch(source, [source.stat("model.safetensors")], attempts=20)
    assert found == [DATA]
    assert at_store
    # What was in flight when it ended, and a few more times for one range.
    assert len(at_mirror) <= 15 + 3 * 6
    assert [one.levelname for one in caplog.records if "mirror" in one.getMessage()][:1] == [
        "WARNING"
    ]
    assert sum(one.levelname == "WARNING" for one in caplog.records) == 1
    assert all(asked.authorization is None for asked in mirror.log)
