"""Registries that fail: what a fault costs, stores without ranges, and storms of faults."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    ChecksumMismatchError,
    FastloadError,
    ObjectMissingError,
    PullError,
    SourceUnavailableError,
)
from fastload_common.pull.pull import pull
from fastload_common.pull.records import PullReport
from fastload_common.testing.scripted_registry import (
    Answer,
    Asked,
    ScriptedRegistry,
    ScriptedStorage,
    ranged,
)
from fastload_common.units import KIB
from tests.common.pull.images import CONFIG, LAYER, archive, compressed, file, sha256
from tests.faults.storm import descriptors, until

SIZES_BYTES = (1_500_000, 700_000, 3_000, 400_000)
SEEDS = range(14)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES_BYTES[number])


def layers() -> list[bytes]:
    return [archive(file(f"file{number}", content(number))) for number in range(len(SIZES_BYTES))]


@dataclass
class Site:
    """A registry, the store that it may redirect to, and a destination."""

    registry: ScriptedRegistry
    storage: ScriptedStorage
    place: Path
    tars: list[bytes] = field(default_factory=layers)

    def push(self, hows: Sequence[str] = ("gzip", "zstd", "none")) -> None:
        blobs = [compressed(tar, hows[n % len(hows)]) for n, tar in enumerate(self.tars)]
        found = [self.registry.put(blob, LAYER) for blob in blobs]
        config = {"rootfs": {"type": "layers", "diff_ids": [sha256(tar) for tar in self.tars]}}
        put = self.registry.put(json.dumps(config).encode(), CONFIG)
        self.registry.artifact("v", found, config=put)

    def redirect(self, life_s: int = 600) -> None:
        self.storage.stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.registry.storage = self.storage
        self.registry.url_life_s = life_s

    @property
    def destination(self) -> Path:
        return self.place / "new"

    def pull(self, **more: object) -> PullReport:
        values: dict[str, object] = {
            "oci_plain_http": (self.registry.host, self.storage.host),
            "concurrent_download_chunk_size": 256 * KIB,
            "max_concurrent_downloads_per_image": 4,
            "max_attempts": 12,
            "read_timeout_s": 3.0,
        }
        settings = Settings(**(values | more))  # type: ignore[arg-type]
        return pull(f"oci://{self.registry.host}/m:v", self.destination, settings)

    def check(self) -> None:
        for number in range(len(self.tars)):
            assert (self.destination / f"file{number}").read_bytes() == content(number)
        assert not list(self.place.glob(".fastload-pull-*"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "place"
    place.mkdir()
    with ExitStack() as stack:
        registry = stack.enter_context(ScriptedRegistry())
        storage = stack.enter_context(ScriptedStorage())
        made = Site(registry, storage, place)
        made.push()
        yield made


def blob_requests(server: ScriptedRegistry | ScriptedStorage, digest: str) -> list[Asked]:
    return [asked for asked in server.log if asked.path.endswith(digest)]


def largest(site: Site) -> tuple[str, bytes]:
    return max(site.registry.blobs.items(), key=lambda item: len(item[1]))


def test_a_body_that_ends_early_costs_the_missing_bytes_only(site: Site) -> None:
    digest, data = largest(site)
    cut: list[Asked] = []

    def script(asked: Asked) -> Answer | None:
        good = ranged(data, asked) if asked.path.endswith(digest) else None
        if good is None or len(cut) == 3 or len(good.body) < 100_000:
            return None
        cut.append(asked)
        return Answer(206, good.body, good.headers, cut_bytes=90_000)

    site.registry.script = script
    report = site.pull()
    site.check()
    assert len(cut) == 3
    assert report.transfer["errors"]["SourceUnavailableError"] >= 3
    # What came before each end was good, and was not asked for again.
    transfer = report.transfer
    received_bytes = transfer["bytes_received"] - transfer["hedge_bytes_wasted"]
    assert received_bytes == report.fetched_bytes == report.size_bytes
    for start in [first(asked) for asked in cut]:
        assert start + 90_000 in [first(asked) for asked in blob_requests(site.registry, digest)]


def first(asked: Asked) -> int:
    return int(asked.headers["range"].removeprefix("bytes=").partition("-")[0])


@pytest.mark.parametrize("where", ["registry", "storage"])
def test_a_store_without_ranges_gives_one_stream_for_each_layer(site: Site, where: str) -> None:
    site.registry.honours_ranges = False
    server: ScriptedRegistry | ScriptedStorage = site.registry
    if where == "storage":
        site.redirect()
        server = site.storage
        server.script = lambda asked: (
            Answer(200, site.registry.blobs[asked.path.rsplit("/", 1)[1]])
            if asked.path.startswith("/store/")
            else None
        )
    report = site.pull()
    site.check()
    assert report.streamed_layers >= 3
    assert report.compared == len(site.tars)
    whole = [a for a in server.log if a.path.endswith(largest(site)[0]) and first(a) == 0]
    assert (
        len([a for a in whole if "-" + str(len(largest(site)[1]) - 1) in a.headers["range"]]) == 1
    )


def test_a_stream_that_breaks_off_begins_anew(site: Site) -> None:
    site.registry.honours_ranges = False
    digest, data = largest(site)
    broken: list[Asked] = []

    def script(asked: Asked) -> Answer | None:
        is_whole = asked.path.endswith(digest) and asked.headers["range"].endswith(
            f"=0-{len(data) - 1}"
        )
        if not is_whole or len(broken) == 2:
            return None
        broken.append(asked)
        return Answer(200, data, cut_bytes=len(data) // 2)

    site.registry.script = script
    report = site.pull()
    site.check()
    assert len(broken) == 2
    # What came twice counts once.
    assert report.fetched_bytes == report.size_bytes


def test_a_full_disk_ends_a_stream_with_an_error(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def full(descriptor: int, start: int, size_bytes: int) -> None:
        if "/blobs/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, start, size_bytes)

    site.registry.honours_ranges = False
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PullError, match="No space left"):
        site.pull()


def test_a_stream_that_begins_anew_with_other_bytes_is_an_error(tmp_path: Path) -> None:
    data = content(0)
    half = len(data) // 2
    whole: list[Asked] = []

    def script(asked: Asked) -> Answer | None:
        if asked.headers.get("range") != f"bytes=0-{len(data) - 1}":
            return None
        whole.append(asked)
        if len(whole) == 1:
            return Answer(200, data, cut_bytes=half)
        # What was compared as it came is written over.
        return Answer(200, bytes(half) + data[half:])

    with ScriptedRegistry() as registry:
        title = {"org.opencontainers.image.title": "model.bin"}
        layer = registry.put(data, "application/octet-stream", title)
        registry.artifact("v1", [layer])
        registry.honours_ranges = False
        registry.script = script
        settings = Settings(oci_plain_http=(registry.host,))
        with pytest.raises(ChecksumMismatchError):
            pull(f"oci://{registry.host}/team/model:v1", tmp_path / "new", settings)
    assert len(whole) == 2
    assert not (tmp_path / "new").exists()


def test_a_stream_that_is_refused_for_good_is_an_error(site: Site) -> None:
    site.registry.honours_ranges = False
    digest, data = largest(site)
    site.registry.script = lambda asked: (
        Answer(404)
        if asked.path.endswith(digest) and asked.headers["range"].endswith(f"-{len(data) - 1}")
        else None
    )
    with pytest.raises(ObjectMissingError):
        site.pull()
    assert not site.destination.exists()


def test_a_pull_that_is_killed_goes_on(site: Site) -> None:
    digest, _ = largest(site)
    served, enough, go_on = [0], threading.Event(), threading.Event()

    def script(asked: Asked) -> Answer | None:
        if asked.path.endswith(digest):
            served[0] += 1
            if served[0] > 3:
                enough.set()
                go_on.wait(60)
        return None

    site.registry.script = script
    settings = ["concurrent_download_chunk_size=256KiB", "max_concurrent_downloads_per_image=1"]
    command = [sys.executable, "-m", "fastload_common.cli.main", "pull"]
    for setting in settings:
        command += ["--set", setting]
    command += [f"oci://{site.registry.host}/m:v", str(site.destination)]
    environ = os.environ | {"FASTLOAD_OCI_PLAIN_HTTP": site.registry.host}
    running = subprocess.Popen(command, env=environ)
    try:
        assert enough.wait(60)
        # What was served before is on the disk when its journal says so.
        journal = next(site.place.glob(".fastload-pull-*/blobs")) / f"{_key(digest)}.parts"
        until(lambda: journal.exists() and journal.stat().st_size > 0)
    finally:
        running.kill()
        running.wait()
        go_on.set()
    assert not site.destination.exists()
    site.registry.script = lambda asked: None
    report = site.pull()
    assert report.resumed_bytes > 0
    assert report.resumed_bytes + report.fetched_bytes == report.size_bytes
    site.check()


def _key(digest: str) -> str:
    return sha256(digest.encode()).removeprefix("sha256:")


@dataclass
class Storm:
    """About every third reply for a blob is wrong. One may be wrong for good."""

    site: Site
    seed: int
    made: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.random = random.Random(f"pull {self.seed}")
        kinds = ["none", "none", "none", "corrupt", "gone", "denied", "down"]
        self.lasting = kinds[self.seed % len(kinds)]
        self.ranges = self.seed % 4 != 3
        self.redirects = self.seed % 2 == 0
        digests = sorted(
            self.site.registry.blobs, key=lambda one: -len(self.site.registry.blobs[one])
        )
        self.victim = digests[self.seed % 2]

    def begin(self) -> None:
        if self.redirects:
            self.site.redirect(life_s=30)
        self.site.registry.honours_ranges = self.ranges
        self.site.registry.script = self.answer
        self.site.storage.script = self.answer

    def end(self) -> None:
        self.site.registry.script = self.site.storage.script = lambda asked: None
        self.site.registry.honours_ranges = True

    @property
    def errors(self) -> tuple[type[FastloadError], ...]:
        return {
            "none": (),
            "corrupt": (ChecksumMismatchError,),
            "gone": (ObjectMissingError,),
            "denied": (AccessDeniedError,),
            "down": (SourceUnavailableError,),
        }[self.lasting]

    def answer(self, asked: Asked) -> Answer | None:
        digest = asked.path.rsplit("/", 1)[1]
        data = self.site.registry.blobs.get(digest)
        if data is None or ("/blobs/" in asked.path and self.redirects):
            return None
        if not self.ranges and len(data) < KIB:
            return None  # the configuration: who reads it asks for the rest of what was cut off
        with self.lock:
            return self._answer(asked, digest, data)

    def _answer(self, asked: Asked, digest: str, data: bytes) -> Answer | None:
        good = ranged(data, asked, ignores=not self.ranges)
        if digest == self.victim and self.lasting != "none":
            if self.lasting == "corrupt":
                return Answer(good.status, _flipped(good.body), good.headers)
            return Answer({"gone": 404, "denied": 403, "down": 503}[self.lasting])
        if self.random.random() > 0.3:
            return good
        third = len(good.body) // 3
        passing = [
            Answer(503, headers={"Retry-After": "0"}),
            Answer(500),
            Answer(429),
            Answer(good.status, good.body, good.headers, cut_bytes=third),
            Answer(good.status, good.body, good.headers, cut_bytes=0),
        ]
        once = {
            "refused": Answer(403, b"expired") if self.redirects else Answer(401),
            "range": Answer(206, good.body, {"Content-Range": f"bytes 1-2/{len(data)}"}),
            "whole": Answer(200, data),
            "short": Answer(good.status, good.body[:-1], good.headers),
        }
        what = self.random.choice(list(once))
        where = f"{what} {asked.headers.get('range')} {digest}"
        if self.redirects and self.random.random() < 0.1:
            self.site.storage.ended.update(self.site.storage.signatures)
        if self.ranges and self.redirects and self.random.random() < 0.3 and where not in self.made:
            self.made.add(where)
            return once[what]
        return self.random.choice(passing)


def _flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_changes_no_byte(site: Site, seed: int) -> None:
    before = descriptors(), {thread.name for thread in threading.enumerate()}
    storm = Storm(site, seed)
    storm.begin()
    patience = 2 if storm.lasting == "down" else 30
    if storm.lasting == "none":
        site.pull(max_attempts=patience)
    else:
        with pytest.raises(storm.errors):
            site.pull(max_attempts=patience)
        assert not site.destination.exists()
        storm.end()
        site.pull()
    site.check()
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("fastload")}
    assert names <= before[1]
    left = {fd: name for fd, name in descriptors().items() if fd not in before[0]}
    assert not [name for name in left.values() if not name.startswith("socket:")]
