"""What layers that are unpacked one after the other hold of memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.pull import workers
from fastload_common.pull.inflate import Inflater, open_inflater
from tests.common.pull.images import Blobs, archive, compressed, file


def test_a_window_is_freed_before_another_layer_gets_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Inflater] = weakref.WeakSet()
    left: list[int] = []
    holding = workers.Windows.holding

    def opened(*args: Any) -> Inflater:
        alive.add(made := open_inflater(*args))
        return made

    @contextmanager
    def held(self: workers.Windows, size_bytes: int) -> Iterator[None]:
        with holding(self, size_bytes):
            yield
            left.append(len(alive))

    monkeypatch.setattr(workers, "open_inflater", opened)
    monkeypatch.setattr(workers.Windows, "holding", held)
    tars = [archive(file(f"file{number}", bytes(300_000))) for number in range(3)]
    stored = [compressed(tar, "zstd") for tar in tars]
    blobs = Blobs(tmp_path / "blobs", settings=Settings(max_concurrent_unpacks_per_image=1))
    blobs.pull(monkeypatch, tmp_path / "new", stored, tars)
    assert left == [0, 0, 0]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["file0", "file1", "file2"]
