"""The prefix in S3 behind the directory: new nodes start from it, none of its faults matters."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastload_common.cli.main import main
from fastload_common.compile_cache.lifecycle import Outcome
from fastload_common.compile_cache.stores.s3 import S3Store
from fastload_common.config import Settings
from fastload_common.testing.rig import (
    ACCESS_DENIED,
    INTERNAL_ERROR,
    SLOW_DOWN,
    Effect,
    Fault,
    Flip,
    Rig,
    Short,
    Stall,
)
from fastload_common.testing.s3_server import S3Server
from tests.cases.cache_node import spawn, started
from tests.cases.harness import use
from tests.common.compile_cache.artefacts import (
    package,
    write_keys,
    write_trees,
)

KEY = package({}).manifest.key
DEADLINE_S = 3.0


class Fleet:
    """Nodes with empty disks that share a prefix."""

    def __init__(self, tmp_path: Path, uri: str, **settings: Any) -> None:
        self.uri = uri
        self._place = tmp_path
        self._starts = 0
        self.settings = (
            Settings(compile_cache_deadline_s=DEADLINE_S)
            if not settings
            else Settings(**({"compile_cache_deadline_s": DEADLINE_S} | settings))
        )

    def start(self, node: str | None, *, limit_s: float = 60, **factors: Any) -> Outcome:
        """A start on a node, or on one that has no directory."""
        self._starts += 1
        place = self._place / f"start-{self._starts}"
        places = (self.uri,) if node is None else (str(self._place / node), self.uri)
        settings = replace(self.settings, compile_cache=places)
        return started(settings, place, factors, limit_s)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Any:
    with Rig() as rig:
        rig.put("bucket", "there", b"")
        use(rig, monkeypatch)
        yield rig


@pytest.fixture
def fleet(rig: Rig, tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, "s3://bucket/cache")


# With a real server


def test_a_new_node_starts_from_s3_and_a_full_one_fills_it(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"s3://{s3_bucket}/some/prefix"
    fleet = Fleet(tmp_path, uri, compile_cache_deadline_s=60.0)
    first = fleet.start("a")
    assert first.published == {str(tmp_path / "a"): "stored", uri: "stored"}
    second = fleet.start("b")
    assert (second.status, second.store) == ("hit", uri)
    third = fleet.start("b")
    assert (third.status, third.store) == ("hit", str(tmp_path / "b")), "it was not kept"
    assert fleet.start(None).status == "hit"
    listed = s3_server.client().list_objects_v2(Bucket=s3_bucket)["Contents"]
    names = sorted(row["Key"] for row in listed)
    blob = package(write_trees(tmp_path / "same")).manifest.blob_sha256
    assert names == [f"some/prefix/v1/blobs/{blob}", f"some/prefix/v1/manifests/{KEY}"]
    other = fleet.start("c", **{"layout.tensor": 8})
    assert other.differing == ["layout.tensor: 8 here, 1 there"]
    # A prefix that lost everything is filled again by a node that has it.
    for name in names:
        s3_server.client().delete_object(Bucket=s3_bucket, Key=name)
    assert fleet.start("b").store == str(tmp_path / "b")
    assert fleet.start("d").store == uri
    assert warnings(caplog) == []


@pytest.mark.parametrize("what", ["blobs", "manifests"])
@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "empty"])
def test_c09_a_damaged_object_is_a_miss_and_heals(
    s3_server: S3Server,
    s3_bucket: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    what: str,
    damage: str,
) -> None:
    fleet = Fleet(tmp_path, f"s3://{s3_bucket}/p", compile_cache_deadline_s=60.0)
    fleet.start("a")
    client = s3_server.client()
    prefix = f"p/v1/{what}/"
    key = client.list_objects_v2(Bucket=s3_bucket, Prefix=prefix)["Contents"][0]["Key"]
    data = client.get_object(Bucket=s3_bucket, Key=key)["Body"].read()
    middle = len(data) // 2
    changed = {
        "cut": data[:-1],
        "bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "empty": b"",
    }
    if damage == "gone":
        client.delete_object(Bucket=s3_bucket, Key=key)
    else:
        client.put_object(Bucket=s3_bucket, Key=key, Body=changed[damage])
    outcome = fleet.start("b")
    assert outcome.status == "miss"
    assert outcome.published[fleet.uri] == "stored", "it would never heal"
    told = 0 if (what, damage) == ("manifests", "gone") else 1
    assert len(warnings(caplog)) == told
    assert fleet.start("c").status == "hit"


def test_c16_an_object_replaced_without_the_key_is_not_used(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = write_keys(tmp_path)
    uri = f"s3://{s3_bucket}/p"
    signing = Fleet(
        tmp_path, uri, compile_cache_signing_key_file=private, compile_cache_deadline_s=60.0
    )
    reading = Fleet(
        tmp_path / "readers",
        uri,
        compile_cache_signing_key_file=public,
        compile_cache_deadline_s=60.0,
    )
    signing.start("a")
    assert reading.start("b").status == "hit"
    evil = package(write_trees(tmp_path / "evil", {"inductor": {"x.py": b"evil"}}))
    client = s3_server.client()
    for name, data in (
        (f"p/v1/blobs/{evil.manifest.blob_sha256}", evil.blob.read()),
        (f"p/v1/manifests/{KEY}", evil.envelope),
    ):
        client.put_object(Bucket=s3_bucket, Key=name, Body=data)
    assert reading.start("c").status == "miss"
    assert "not signed" in warnings(caplog)[-1]
    assert signing.start("d").published[uri] == "stored"
    assert reading.start("e").status == "hit"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["cache", *arguments])
    return code, capsys.readouterr().out


def test_the_commands_move_entries_and_tell_of_them(
    s3_server: S3Server,
    s3_bucket: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = f"s3://{s3_bucket}/p"
    fleet = Fleet(tmp_path, uri, compile_cache_deadline_s=60.0)
    fleet.start("a")
    fleet.start("a", **{"layout.tensor": 8})
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", f"{tmp_path / 'b'},{uri}")
    code, out = run(capsys, "list")
    assert code == 0
    assert out.count(uri) == 2
    code, out = run(capsys, "pull", KEY[:8])
    assert "copied" in out
    code, out = run(capsys, "verify")
    assert (code, out.count("good")) == (0, 3)
    code, out = run(capsys, "show", KEY[:8])
    assert "hardware.cpu_isa" in out
    assert str(tmp_path / "b") in out
    other = next(k for k in S3Store(uri, Settings()).keys() if k != KEY)  # noqa: SIM118
    code, out = run(capsys, "diff", KEY, other)
    assert out.splitlines() == ["layout.tensor: 1 | 8"]
    code, out = run(capsys, "prewarm")
    assert "copied" not in out, "that is not what this machine could use"
    code, out = run(capsys, "prewarm", "--all")
    assert out.count("copied") == 1
    assert out.count("already") == 1
    blob = tmp_path / "b/v1/entries" / KEY / "blob"
    blob.write_bytes(blob.read_bytes()[:-1])
    code, out = run(capsys, "verify", KEY[:8])
    assert (code, out.count("good")) == (1, 1)
    code, out = run(capsys, "gc", "--max-bytes", "0")
    assert out.startswith("removed 2 entries")
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", f"{tmp_path / 'a'},s3://{s3_bucket}/elsewhere")
    code, out = run(capsys, "push")
    assert out.count("copied") == 2
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", str(tmp_path / "a"))
    assert main(["cache", "push"]) == 2
    assert main(["cache", "show", "ffff"]) == 2


# With a server that does harm


REFUSALS: list[Effect] = [ACCESS_DENIED, SLOW_DOWN, INTERNAL_ERROR]


@pytest.mark.parametrize("effect", REFUSALS, ids=["403", "503", "500"])
@pytest.mark.parametrize("methods", [("PUT",), ("GET", "HEAD", "PUT", "LIST")], ids=["put", "all"])
def test_c20_a_store_that_refuses_is_one_warning(
    rig: Rig,
    fleet: Fleet,
    caplog: pytest.LogCaptureFixture,
    effect: Effect,
    methods: tuple[str, ...],
) -> None:
    rig.arrange([Fault(effect, methods=methods)])
    outcome = fleet.start("a")
    assert outcome.status == "miss"
    assert outcome.published[str(fleet._place / "a")] == "stored"
    assert outcome.published[fleet.uri] not in ("", "stored")
    assert len(warnings(caplog)) == 1, warnings(caplog)
    assert fleet.uri in warnings(caplog)[0]
    assert fleet.start("a").status == "hit"
    rig.arrange([])
    assert fleet.start("a").status == "hit"
    assert fleet.start("b").status == "hit", "the first node did not fill the prefix"


def test_c20_a_store_that_hangs_delays_a_start_by_the_deadline_at_most(
    rig: Rig, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    rig.arrange([Fault(Stall(), methods=("GET", "HEAD", "PUT", "LIST"))])
    outcome = fleet.start("a")
    assert outcome.status == "miss"
    assert outcome.restore_s < DEADLINE_S + 2
    assert len(warnings(caplog)) == 1
    rig.release()


def test_c20_an_upload_that_hangs_delays_the_end_of_a_process_by_the_deadline_at_most(
    rig: Rig, tmp_path: Path
) -> None:
    rig.arrange([Fault(Stall(), methods=("PUT",))])
    process = spawn("leave", tmp_path, f"{tmp_path / 'cache'},s3://bucket/cache")
    begun_s = time.monotonic()
    assert process.wait(60) == 0
    assert time.monotonic() - begun_s < 2.0 + 8.0  # it runs on a busy machine
    assert len(list((tmp_path / "cache/v1/entries").iterdir())) == 1
    rig.release()


def test_c20_a_store_that_nobody_answers_for(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    outcome = fleet.start("a")
    assert outcome.status == "miss"
    assert outcome.restore_s < DEADLINE_S + 2
    assert len(warnings(caplog)) == 1
    assert fleet.start("a").store == str(fleet._place / "a")


@pytest.mark.parametrize("effect", [Short(after_share=0.5), Flip(10), SLOW_DOWN], ids=str)
def test_a_passing_fault_while_an_entry_is_read_is_asked_again_or_a_miss(
    rig: Rig, fleet: Fleet, effect: Effect
) -> None:
    fleet.start("a")
    rig.arrange([Fault(effect, name="*/blobs/*", attempts=(1,))])
    outcome = fleet.start("b")
    assert outcome.status == ("miss" if isinstance(effect, Flip) else "hit")
    rig.arrange([])
    assert fleet.start("c").status == "hit"


def test_the_manifest_is_written_last(rig: Rig, fleet: Fleet) -> None:
    fleet.start("a")
    puts = [request.name for request in rig.log.requests() if request.kind == "PUT"]
    assert [name.split("/")[-2] for name in puts] == ["blobs", "manifests"]


def test_an_entry_that_is_there_is_not_sent_again(rig: Rig, fleet: Fleet) -> None:
    fleet.start("a")
    rig.log.clear()
    fleet.start("b")
    fleet.start("b")
    assert [request.kind for request in rig.log.requests() if request.kind == "PUT"] == []


def test_nothing_of_the_entry_is_written_to_disk_without_a_directory(
    rig: Rig, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start(None)
    assert fleet.start(None).status == "hit"
    assert sorted(os.listdir(tmp_path)) == ["start-1", "start-2"]


def test_a_large_entry_comes_in_several_ranges(rig: Rig, fleet: Fleet, tmp_path: Path) -> None:
    import random

    noise = random.Random(1).randbytes(20 << 20)
    made = package(write_trees(tmp_path / "large", {"inductor": {"x": noise}}))
    store = S3Store(fleet.uri, fleet.settings)
    assert store.put(made).stored
    entry = store.get(KEY)
    assert entry is not None
    made.blob.seek(0)
    with entry:
        assert entry.blob.read() == made.blob.read()
    gets = [request for request in rig.log.gets() if "/blobs/" in request.name]
    assert len(gets) == 3
