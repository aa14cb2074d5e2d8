"""The stage of a pull: what it leaves behind, and whose it is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import SourceError
from fastload_common.pull.pull import pull
from fastload_common.pull.stage import Stage


def test_a_source_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        pull(str(tmp_path / "absent"), tmp_path / "new", Settings())
    assert os.listdir(tmp_path) == []


def test_a_source_that_is_not_there_leaves_what_had_come(tmp_path: Path) -> None:
    with Stage(tmp_path / "new") as stage:
        (stage.blobs / "blob").write_bytes(b"bytes")
    with pytest.raises(SourceError):
        pull(str(tmp_path / "absent"), tmp_path / "new", Settings())
    assert (stage.blobs / "blob").read_bytes() == b"bytes"


def test_a_lock_on_a_stage_that_was_made_anew_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    swapped: list[Path] = []

    def flock(descriptor: int, operation: int) -> None:
        real(descriptor, operation)
        if not swapped:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            swapped.append(path.rename(tmp_path / "old"))
            path.mkdir(mode=0o700)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Stage(tmp_path / "new") as stage:
        lock = os.open(stage.path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            real(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
