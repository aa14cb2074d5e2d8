"""Loads with a node cache on disks that are full, read-only, slow, dead, or not there."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload_common.clock import SystemClock
from fastload_common.range_cache import node_cache
from fastload_common.range_cache.entry import Entry
from fastload_common.ranges import ByteRange
from fastload_common.testing.rig import Rig
from fastload_common.units import MIB
from tests.common.exchange.exchange_harness import load_ranks, settings_of
from tests.common.range_cache.conftest import all_right, fetched, files, load, sent, size_of, total

Tensors = dict[str, torch.Tensor]

# Behind what is read of an object for its header.
BODY = ByteRange(1_000_000, 2_000_000)


def reason(outcomes: Sequence[Any]) -> str:
    return str(outcomes[0].report.node_cache["reason"])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_full_disk_is_one_warning(
    rig: Rig,
    root: Path,
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    room = [3 * MIB]
    pwrite = os.pwrite

    def little(fd: int, data: Any, offset: int) -> int:
        if room[0] <= 0:
            raise OSError(28, os.strerror(28))
        done = pwrite(fd, data[: room[0]], offset)
        room[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", little)
    outcomes = load(root, 1)
    all_right(outcomes, tensors)
    assert "No space left" in reason(outcomes)
    assert len(warnings_of(caplog)) == 1
    assert total(outcomes, "kept_bytes") <= 3 * MIB
    assert total(outcomes, "dropped_bytes") >= size_of(tensors) - 3 * MIB
    monkeypatch.undo()


def test_a_full_file_system_is_one_warning(
    rig: Rig, small_disk: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = load(small_disk, 1)
    all_right(outcomes, tensors)
    assert "full: entries in use take" in reason(outcomes)
    assert len(warnings_of(caplog)) == 1
    assert 0 < total(outcomes, "kept_bytes") < size_of(tensors)
    sent(rig)
    outcomes = load(small_disk, 2)
    all_right(outcomes, tensors)
    assert 0 < sent(rig) < size_of(tensors)


def test_a_read_only_disk_is_read(
    rig: Rig,
    root: Path,
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(root, 2)
    gone = files(root)[0]
    gone.with_suffix(".journal").unlink()
    sent(rig)
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK)
    outcomes = load(root, 1)
    monkeypatch.undo()
    all_right(outcomes, tensors)
    assert abs(sent(rig) - gone.stat().st_size) < 128 * 1024
    assert total(outcomes, "kept_bytes") == 0
    assert len(warnings_of(caplog)) == 1
    assert not gone.with_suffix(".journal").exists()


def test_a_disk_that_is_mounted_read_only_is_read(
    rig: Rig, disk: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    remount = ["mount", "-o", "remount,ro", str(disk)]
    empty = disk / "empty"
    empty.mkdir()
    load(disk, 2)
    sent(rig)
    subprocess.run(remount, check=True)
    outcomes = load(disk, 3)
    all_right(outcomes, tensors)
    assert sent(rig) == 0
    assert "is read-only" in reason(outcomes)
    assert len(warnings_of(caplog)) == 3  # one of each rank
    outcomes = load(empty, 1)
    all_right(outcomes, tensors)
    assert "cannot be made: Read-only file system" in reason(outcomes)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("s3://bucket/cache", "not a place in a store"),
        ("~/cache", "~ is not replaced"),
        ("nvme/cache", "give the whole path"),
        ("/nonexistent", "is no directory"),
    ],
)
def test_a_path_that_was_meant_otherwise_is_explained(path: str, hint: str) -> None:
    cache = node_cache.NodeCache(Path(path), None, SystemClock())
    said = cache.facts()["reason"]
    cache.close()
    assert hint in said
    assert ("; " in said) == (hint != "is no directory")


def test_a_directory_that_is_not_there_is_one_warning(
    rig: Rig, root: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = load(root / "missing", 2)
    all_right(outcomes, tensors)
    assert "is no directory" in reason(outcomes)
    assert len(warnings_of(caplog)) == 2  # one of each rank
    assert fetched(outcomes) >= 0.99 * size_of(tensors)


@pytest.mark.parametrize("what", ["preadv", "flock", "open"])
def test_a_disk_that_fails_is_no_reason_to_fail(
    rig: Rig, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import fcntl

    load(root, 1)
    sent(rig)

    def fails(*args: Any, **more: Any) -> Any:
        raise OSError(5, os.strerror(5))

    def fails_in_cache(path: Any, *args: Any, **more: Any) -> int:
        if str(path).startswith(str(root)):
            raise OSError(5, os.strerror(5))
        return opens(path, *args, **more)

    opens = os.open
    if what == "flock":
        monkeypatch.setattr(fcntl, "flock", fails)
    elif what == "open":
        monkeypatch.setattr(os, "open", fails_in_cache)
    else:
        monkeypatch.setattr(os, "preadv", fails)
    outcomes = load(root, 2)
    monkeypatch.undo()
    all_right(outcomes, tensors)
    assert "Input/output error" in reason(outcomes)
    assert sent(rig) >= size_of(tensors)


@pytest.mark.parametrize("where", ["_check", "open"])
def test_a_disk_that_does_not_answer_is_left(
    rig: Rig,
    root: Path,
    tensors: Tensors,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    load(root, 1)
    sent(rig)
    answer = threading.Event()
    works = getattr(Entry, where)

    def hangs(self: Entry, *args: Any, **more: Any) -> Any:
        # The first blocks hold the headers, which are read by other means.
        if where == "open" or args[0].wanted.start > BODY.start:
            assert answer.wait(60)
        return works(self, *args, **more)

    monkeypatch.setattr(Entry, where, hangs)
    monkeypatch.setattr(node_cache, "PATIENCE_S", 0.3)
    try:
        outcomes = load_ranks(
            "s3://models/m", 1, settings_of(memory_bytes="256MiB", node_cache=str(root))
        )
        all_right(outcomes, tensors)
        assert "did not end within" in reason(outcomes) or "no answer" in reason(outcomes)
        assert sent(rig) > size_of(tensors) / 4
        assert len([text for text in warnings_of(caplog) if "without it" in text]) == 1
    finally:
        answer.set()


@pytest.mark.parametrize("suffix", [".data", ".journal"])
def test_a_disk_that_stops_answering_while_an_entry_is_opened_is_left(
    rig: Rig, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    load(root, 1)
    sent(rig)
    answer = threading.Event()
    opens = os.open

    def hangs(path: Any, *args: Any, **more: Any) -> int:
        if str(path).startswith(str(root)) and str(path).endswith(suffix):
            assert answer.wait(60)
        return opens(path, *args, **more)

    monkeypatch.setattr(os, "open", hangs)
    monkeypatch.setattr(node_cache, "PATIENCE_S", 0.3)
    try:
        outcomes = load_ranks(
            "s3://models/m", 2, settings_of(memory_bytes="256MiB", node_cache=str(root))
        )
        assert not answer.is_set()
        all_right(outcomes, tensors)
        assert "no answer" in reason(outcomes)
        assert sent(rig) >= size_of(tensors)
    finally:
        answer.set()


def test_a_slow_disk_never_slows_the_load(
    rig: Rig, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    writes = Entry.write

    def slow(self: Entry, *args: Any) -> Any:
        assert go_on.wait(60)
        return writes(self, *args)

    monkeypatch.setattr(Entry, "write", slow)
    outcomes = load_ranks(
        "s3://models/m", 1, settings_of(memory_bytes="20MiB", node_cache=str(root))
    )
    row = outcomes[0].report.node_cache
    all_right(outcomes, tensors)  # though nothing at all was written
    assert row["kept_bytes"] == 0
    assert row["dropped_bytes"] > 0
    assert row["pending_bytes"] > 0
    go_on.set()
    assert node_cache_is_written()
    assert files(root)


def node_cache_is_written() -> bool:
    from fastload_common.range_cache.writer import finish_writes

    return finish_writes(30)
