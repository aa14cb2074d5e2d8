"""A few pairs of servers with a compile cache, in every run; and whether faults would be told."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.faults import run_compile_cache
from tests.faults.compile_damage import KINDS, PLACES, damage, file_of, span_of
from tests.faults.compile_server import (
    FILES,
    INDEX,
    WrongArtefactError,
    answer_of,
    find,
    make,
)


@pytest.mark.s3
def test_servers_that_are_not_killed_answer_with_whole_artefacts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Its seeds have kills, damage in both stores, another user, one directory and two.
    status = run_compile_cache.main(["--pairs", "4", "--first", "2", "--bytes", "3000"])
    found = json.loads(capsys.readouterr().out)
    assert found["bad"] == []
    assert status == 0
    assert found["pairs"] == 4
    assert found["measured"]["hit"] >= 4


# What is wrong is told


def row(**more: Any) -> dict[str, Any]:
    good = {
        "status": 0,
        "answer": answer_of(1),
        "began": True,
        "done": True,
        "measured": "hit",
        "outcome": {},
        "warnings": [],
        "stderr": "",
    }
    return {**good, **more}


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        ({"status": 3, "fault": "f0 is not whole"}, "status 3: f0 is not whole"),
        ({"status": -6, "stderr": "a hang's stacks"}, "status -6: a hang's stacks"),
        ({"answer": answer_of(2)}, f"it answers {answer_of(2)}"),
        ({"done": False}, "it could not publish in time"),
        ({"began": False}, "it had no cache"),
        ({"measured": "miss"}, "miss instead of a hit"),
        ({"stderr": "Traceback (most recent call last)"}, "Traceback"),
    ],
)
def test_what_is_wrong_is_told(ended: dict[str, Any], fault: str) -> None:
    storm = run_compile_cache.Storm([], Namespace(torch=False))
    storm._judge("a", 1, row(), hit=True)
    assert storm.tally.bad == []
    storm._judge("a", 1, row(**ended), hit=True)
    assert [text.startswith(f"a: {fault}") for text in storm.tally.bad] == [True]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make(tmp_path, 1, 500)
    assert find(tmp_path, 1) == len(FILES) + 1
    return tmp_path


def test_half_an_artefact_is_found_out(made: Path) -> None:
    path = made / FILES[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WrongArtefactError, match="not whole"):
        find(made, 1)


def test_artefacts_of_another_key_are_found_out(made: Path) -> None:
    with pytest.raises(WrongArtefactError, match="the index of 1"):
        find(made, 2)
    index = json.loads((made / INDEX).read_bytes())
    (made / INDEX).write_text(json.dumps({**index, "key": 2}))
    with pytest.raises(WrongArtefactError, match="wanted of key 2"):
        find(made, 2)


def test_artefacts_of_two_compilations_are_found_out(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", 1, 500)
    (tmp_path / "other" / FILES[3]).rename(made / FILES[3])
    for path in sorted((tmp_path / "other").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(WrongArtefactError, match="another compilation"):
        find(made, 1)


def test_an_unfinished_compilation_is_found_out(made: Path) -> None:
    (made / INDEX).unlink()
    with pytest.raises(WrongArtefactError, match="unfinished"):
        find(made, 1)
    (made / FILES[0]).unlink()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_class_of_bytes_is_damaged_where_it_is(place: str, kind: str) -> None:
    manifest = b"magic 1\n{...payload...}\nunsigned\n" + b"d" * 64 + b"\n"
    data = manifest if file_of(place) == "manifest" else bytes(range(1, 256)) * 3
    start, end = span_of(place, data)
    assert 0 <= start < end <= len(data)
    damaged = damage(data, place, kind, Random(1))
    assert damaged != data
    assert damaged[:start] == data[:start]
    if kind == "flip":
        assert damaged[end:] == data[end:]


def test_the_classes_are_the_lines_of_a_manifest() -> None:
    manifest = b"magic\npayload\nunsigned\ndigest\n"
    spans = [span_of(place, manifest) for place in PLACES if file_of(place) == "manifest"]
    lines = [manifest[start:end] for start, end in spans]
    assert lines == [b"magic\n", b"payload\n", b"unsigned\n", b"digest\n"]
