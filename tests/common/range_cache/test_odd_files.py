"""Something odd in the place of one object's files costs that object, and nothing else."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastload_common.cli.main import main
from fastload_common.clock import SystemClock
from fastload_common.range_cache.place import CacheDirectory, FullError
from fastload_common.testing.rig import Rig
from fastload_common.units import MIB
from tests.common.range_cache.conftest import all_right, files, load, sent, total

Tensors = dict[str, torch.Tensor]


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "target")


def directory(path: Path) -> None:
    path.mkdir()


def bound_socket(path: Path) -> None:
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)  # such names are short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def of_another_user(path: Path) -> None:
    path.touch()
    os.chown(path, 12345, 12345)


def too_long(path: Path) -> None:
    path.touch()
    os.truncate(path, 65 * MIB)


ODD: list[tuple[str, Callable[[Path], None], str]] = [
    (".data", link, "is a link"),
    (".data", os.mkfifo, "is not a regular file"),
    (".data", directory, "is a directory"),
    (".data", bound_socket, "is not a regular file"),
    (".data", of_another_user, "belongs to user 12345"),
    (".journal", link, "is a link"),
    (".journal", directory, "is a directory"),
    (".journal", too_long, "is too long, remove it"),
    (".new", directory, "is a directory"),
    (".json", directory, "is a directory"),
]


@pytest.mark.parametrize(("suffix", "make", "said"), ODD)
def test_it_costs_one_object_and_is_named(
    rig: Rig,
    root: Path,
    tensors: Tensors,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    make: Callable[[Path], None],
    said: str,
) -> None:
    if make is of_another_user and os.getuid():
        pytest.skip("only root gives files away")
    load(root, 1)
    sent(rig)
    data = files(root)[0]
    size_bytes = data.stat().st_size
    odd = data.with_suffix(suffix)
    for one in (suffix, ".json", ".journal"):
        data.with_suffix(one).unlink(missing_ok=True)
    make(odd)
    target = root / "target"
    target.write_bytes(b"x")
    for ranks in (1, 2):
        caplog.clear()
        outcomes = load(root, ranks)
        all_right(outcomes, tensors)
        # Headers are read by each rank.
        assert size_bytes <= sent(rig) <= size_bytes + ranks * 128 * 1024
        assert total(outcomes, "kept_bytes") == 0
        reasons = [str(o.report.node_cache["reason"]) for o in outcomes]
        assert any(f"{odd} {said}" in reason for reason in reasons)
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert 1 <= len(warned) <= ranks
    assert target.read_bytes() == b"x"
    for command in ("show", "verify", "gc"):
        assert main(["node-cache", command, "--set", f"node_cache={root}"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("suffix", "make"), [(s, m) for s, m, _ in ODD if m is not of_another_user]
)
def test_room_is_made_all_the_same(
    rig: Rig, root: Path, suffix: str, make: Callable[[Path], None]
) -> None:
    load(root, 1)
    odd = files(root)[0].with_suffix(suffix)
    odd.unlink(missing_ok=True)
    make(odd)
    place = CacheDirectory(root, None, SystemClock())
    place.open()
    with pytest.raises(FullError):
        place.require_room(1 << 60)
    left = set(place.path.iterdir())
    assert left == set() or (make is directory and {path.stem for path in left} == {odd.stem})
