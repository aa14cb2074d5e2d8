"""The directory of the compile cache: all or nothing, whatever dies, breaks or is hostile."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastload_common.clock import SystemClock
from fastload_common.compile_cache.lifecycle import CompileCache
from fastload_common.compile_cache.stores import directory as directory_facts
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.unpack import unpack
from tests.cases.cache_node import BOUND_BYTES, Node, spawn, warnings, worker
from tests.common.compile_cache.artefacts import FACTORS, TREES, package, write_trees

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_second_start_hits_and_another_one_is_told_what_differs(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = node.start(), node.start()
    assert (first.status, first.published) == ("miss", {str(node.cache): "stored"})
    assert (second.status, second.store) == ("hit", str(node.cache))
    assert second.content_bytes == sum(len(d) for tree in TREES.values() for d in tree.values())
    other = node.start(**{"software.torch": "2.14"})
    assert other.nearest_key == first.key
    assert other.differing == ["software.torch: 2.14 here, 2.13.0+cpu there"]
    assert json.loads(json.dumps(other.record()))["status"] == "miss"
    assert warnings(caplog) == []


# C01 and C09: processes


def test_c01_pairs_of_publishers_and_readers(tmp_path: Path) -> None:
    found = worker("pairs", tmp_path, 50)
    assert found["failed"] == 0, found["stderr"]


def test_c09_a_writer_is_killed_at_50_random_moments(tmp_path: Path) -> None:
    found = worker("kills", tmp_path, 50)
    assert found["killed"] > 10
    assert found["miss"] > 5
    assert found["last"].isdigit()


def test_c09_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    class Later(SystemClock):
        def wall_s(self) -> float:
            return super().wall_s() + 120

    made = package(write_trees(tmp_path / "a"))
    store = NodeStore(tmp_path / "cache", max_bytes=BOUND_BYTES, clock=Later())
    store.put(made)
    dead = tmp_path / "cache/v1/drafts/dead"
    alive = tmp_path / "cache/v1/drafts/alive"
    for draft in (dead, alive):
        draft.mkdir()
        (draft / "blob").write_bytes(b"half")
    descriptor = os.open(alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    store.collect()
    assert not dead.exists()
    assert alive.exists()
    os.close(descriptor)
    NodeStore(tmp_path / "cache", max_bytes=BOUND_BYTES).collect()
    assert alive.exists(), "it is too young: its writer may be about to lock it"


@pytest.mark.parametrize("file", ["manifest", "blob"])
@pytest.mark.parametrize("damage", ["0", "1", "half", "n-1", "bit", "gone"])
def test_c09_a_damaged_file_costs_one_start_and_heals(
    node: Node, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.start()
    path = node.entry / file
    data = path.read_bytes()
    length = {"0": 0, "1": 1, "half": len(data) // 2, "n-1": len(data) - 1}.get(damage)
    if damage == "gone":
        path.unlink()
    elif length is not None:
        path.write_bytes(data[:length])
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    damaged = node.start()
    assert damaged.status == "miss"
    assert damaged.published == {str(node.cache): "stored"}
    assert len(warnings(caplog)) == 1
    assert "quarantine" in warnings(caplog)[0]
    assert len(list((node.cache / "v1/quarantine").iterdir())) == 1
    assert node.start().status == "hit"
    assert node.leftovers() == []


def test_c09_quarantine_keeps_the_last_few_only(node: Node) -> None:
    for _ in range(7):
        node.start()
        (node.entry / "blob").write_bytes(b"")
        assert node.start().status == "miss"
    assert len(list((node.cache / "v1/quarantine").iterdir())) == 4


def test_c09_clocks_that_are_wrong_do_no_harm(tmp_path: Path) -> None:
    class Wrong(SystemClock):
        def wall_s(self) -> float:
            return 0.0

    made = package(write_trees(tmp_path / "a"))
    store = NodeStore(tmp_path / "cache", max_bytes=BOUND_BYTES, clock=Wrong())
    assert store.put(made).stored
    os.utime(tmp_path / "cache/v1/entries" / made.manifest.key, (1 << 33, 1 << 33))
    assert store.collect() == (0, made.manifest.blob_bytes + len(made.envelope))
    store.verify(made.manifest.key)


# C11: a directory on another machine


def test_c11_no_lock_is_taken_where_the_directory_is_on_another_machine(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def refuse(descriptor: int, *more: Any) -> None:
        assert str(node.cache) not in os.readlink(f"/proc/self/fd/{descriptor}")
        real(descriptor, *more)

    monkeypatch.setattr(
        "fastload_common.compile_cache.stores.node.is_network_mount", lambda _: True
    )
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert node.start().published == {str(node.cache): "stored"}
    assert node.start().status == "hit"


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.s3fs", "ext4"])
def test_c11_mounts_are_told_by_their_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "21 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        f"22 21 0:45 / {tmp_path} rw,relatime shared:2 - {kind} server:/x rw\n"
        f"23 21 0:46 / {tmp_path}-other rw - tmpfs tmpfs rw\nnonsense\n"
    )
    real = open

    def opened(path: Any, *arguments: Any, **named: Any) -> Any:
        return real(table if path == "/proc/self/mountinfo" else path, *arguments, **named)

    monkeypatch.setattr("builtins.open", opened)
    assert directory_facts.is_network_mount(tmp_path / "cache") is (kind != "ext4")


@pytest.mark.parametrize("code", ["ESTALE", "EBUSY", "ENOTEMPTY", "EEXIST", "EIO"])
@pytest.mark.parametrize("call", ["rename", "open", "fsync", "listdir"])
def test_c11_errors_of_such_file_systems_are_a_miss_and_one_warning(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    call: str,
) -> None:
    node.start()
    shutil.rmtree(node.entry)
    module = "fastload_common.compile_cache.stores.node"
    real = getattr(os, call)

    def fail(first: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(first, int) or str(node.cache) in str(first):
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(first))
        return real(first, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.os.{call}", fail)
        assert node.start().status == "miss"
    silent = call == "rename" and code in ("ENOTEMPTY", "EEXIST")  # another one was faster
    assert len(warnings(caplog)) == (0 if silent else 1)
    # Whatever that one could not do, the next one can.
    node.start()
    assert node.start().status == "hit"
    assert node.leftovers() == []


def test_c11_the_slower_of_two_writers_gives_its_entry_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fastload_common.compile_cache.stores.node.is_network_mount", lambda _: True
    )
    made = package(write_trees(tmp_path / "a"))
    store = NodeStore(tmp_path / "cache", max_bytes=BOUND_BYTES)
    real = os.rename
    others: list[bool] = []

    def rename(source: Any, target: Any) -> None:
        if not others:
            others.append(True)
            assert NodeStore(tmp_path / "cache", max_bytes=BOUND_BYTES).put(made).stored
        real(source, target)

    monkeypatch.setattr("fastload_common.compile_cache.stores.node.os.rename", rename)
    assert store.put(made).reason == "another process was faster"
    store.verify(made.manifest.key)
    assert os.listdir(tmp_path / "cache/v1/drafts") == []


def test_c09_what_a_killed_start_left_beside_the_engines_directories_is_removed(
    tmp_path: Path,
) -> None:
    made = package(write_trees(tmp_path / "a"))
    there = tmp_path / "b"
    for name, age_s in (("dead", 3600), ("young", 0), ("alive", 3600)):
        draft = there / f".fastload-unpacking-{name}"
        (draft / "tree").mkdir(parents=True)
        now_s = draft.stat().st_mtime
        os.utime(draft, (now_s - age_s, now_s - age_s))
    descriptor = os.open(there / ".fastload-unpacking-alive", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unpack(made.manifest, made.blob, {name: there / name for name in TREES})
    os.close(descriptor)
    left = {path.name.removeprefix(".fastload-unpacking-") for path in there.glob(".fastload*")}
    assert left == {"young", "alive"}


def test_c13_the_key_is_that_of_the_moment_of_restoring(node: Node, tmp_path: Path) -> None:
    cache = CompileCache.open(node.settings, SystemClock())
    assert cache is not None
    table = {"a": 1}
    factors = {**FACTORS, "engine.factors": table}
    outcome = cache.restore(factors, {name: tmp_path / "b" / name for name in TREES})
    table["a"] = 2
    factors["engine.version"] = "changed by the engine's own start"
    cache.publish(outcome, write_trees(tmp_path / "c"))
    assert cache.close(60)
    assert node.start(**{"engine.factors": {"a": 1}}).status == "hit"


def test_c20_what_is_published_at_the_end_of_a_process_is_published(tmp_path: Path) -> None:
    process = spawn("leave", tmp_path, tmp_path / "cache")
    assert process.wait(60) == 0
    assert len(NodeStore(tmp_path / "cache", max_bytes=BOUND_BYTES).keys()) == 1
