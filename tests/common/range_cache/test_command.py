"""``fastload node-cache``: what is held, room, and checks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fastload_common.cli.main import main
from fastload_common.range_cache.place import directory_of
from fastload_common.range_cache.records import BLOCK_BYTES
from fastload_common.ranges import ByteRange
from tests.common.range_cache.cache_bench import SIZE_BYTES, hold


def run(root: Path, *words: str) -> int:
    return main(["node-cache", *words, "--set", f"node_cache={root}"])


def test_show_says_what_is_held(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold(root, [ByteRange(0, BLOCK_BYTES), ByteRange(10, 20)])
    assert run(root, "show", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["uri"].endswith("/a")
    assert (row["held_bytes"], row["object_bytes"]) == (BLOCK_BYTES, SIZE_BYTES)
    assert BLOCK_BYTES <= row["disk_bytes"] < 2 * BLOCK_BYTES
    assert run(root, "show") == 0
    said = capsys.readouterr().out
    assert "1.0 MiB" in said
    assert str(root) in said


def test_verify_finds_damage_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = hold(root, [ByteRange(0, SIZE_BYTES)])
    assert run(root, "verify") == 0
    assert "3.0 MiB good\n" in capsys.readouterr().out
    with data.open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"not what was there")
    assert run(root, "verify") == 1
    assert "2.0 MiB good, 1.0 MiB damaged and forgotten" in capsys.readouterr().out
    assert run(root, "verify") == 0
    assert "2.0 MiB good\n" in capsys.readouterr().out
    data.with_suffix(".json").write_text("{")
    assert run(root, "verify") == 0
    assert "nobody wrote down what it is" in capsys.readouterr().out


def test_gc_keeps_to_the_bound(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = hold(root, [ByteRange(0, SIZE_BYTES)])
    assert run(root, "gc") == 0
    assert "removed 0 objects" in capsys.readouterr().out
    assert run(root, "gc", "--max-bytes", "1MiB") == 0
    assert "removed 1 objects, 0 B left" in capsys.readouterr().out
    assert not data.exists()


@pytest.mark.parametrize("words", [["show"], ["gc", "--max-bytes", "1MiB"], ["verify"]])
def test_nothing_is_made_that_a_load_of_another_user_would_stumble_over(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(root, *words) == 0
    assert "nothing is held yet" in capsys.readouterr().out
    assert list(root.iterdir()) == []
    assert run(root, "show", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    data = hold(root, [ByteRange(0, SIZE_BYTES)])
    before = {path.name for path in data.parent.iterdir()}
    with data.open("r+b") as file:
        file.write(b"not what was there")
    run(root, *words)
    assert {path.name for path in data.parent.iterdir()} <= before


@pytest.mark.parametrize("kind", ["fifo", "link", "large", "deep"])
def test_what_says_what_it_is_may_be_anything(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    facts = hold(root, [ByteRange(0, SIZE_BYTES)]).with_suffix(".json")
    right = facts.read_bytes()
    facts.unlink()
    if kind == "fifo":
        os.mkfifo(facts)
    elif kind == "link":
        (tmp_path / "right").write_bytes(right)
        facts.symlink_to(tmp_path / "right")
    elif kind == "large":
        facts.write_bytes(right)
        os.truncate(facts, 1 << 40)
    else:
        facts.write_bytes(b"[" * 50_000)
    assert run(root, "show") == 0
    assert run(root, "verify") == 0
    assert "nobody wrote down what it is" in capsys.readouterr().out


def test_without_a_cache_it_says_so(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTLOAD_NODE_CACHE", raising=False)
    assert main(["node-cache", "show"]) == 2
    assert "FASTLOAD_NODE_CACHE is not set" in capsys.readouterr().err
    assert run(root / "missing", "gc") == 2
    assert "is no directory" in capsys.readouterr().err
    directory_of(root).mkdir()
    directory_of(root).chmod(0o777)
    assert run(root, "show") == 2
    assert "can be written by others" in capsys.readouterr().err
