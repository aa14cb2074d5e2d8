"""``fastload cache key`` with an engine: what is asked and printed, and what diff makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastload_common.cli import adapters
from fastload_common.cli.main import main
from fastload_common.compile_cache.key import key_of
from fastload_common.errors import EngineUnsupportedError
from tests.common.compile_cache.artefacts import FACTORS

Run = Callable[..., tuple[int, str, str]]


class Maker:
    """Takes ``--max-model-len N``; prints, as engines do, also past Python."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.installed = True

    def check(self) -> None:
        if not self.installed:
            raise EngineUnsupportedError("it is not installed")

    def factors(self, arguments: Sequence[str]) -> dict[str, Any]:
        self.asked.append(list(arguments))
        print("a line of the engine")
        os.write(1, b"and one of its libraries\n")
        table = {"VLLM_X": 1, "VLLM_Y": {"deep": [1, 2]}}
        length = int(arguments[arguments.index("--max-model-len") + 1])
        return {**FACTORS, "limits.max_model_len": length, "engine.factors": table}


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    point = SimpleNamespace(name="test", load=lambda: made)
    found = SimpleNamespace(entry_points=lambda group: [point])
    monkeypatch.setattr(adapters, "metadata", found)
    return made


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["cache", *arguments])
        return code, *capfd.readouterr()

    return call


def asked(*more: str, length: int = 64) -> list[str]:
    command = ["key", "s3://bucket/model", "--engine", "test", *more]
    return [*command, "--", "--max-model-len", str(length), "--port", "99"]


def test_the_engine_gets_its_own_command_line(maker: Maker, run: Run) -> None:
    code, out, err = run(*asked())
    assert code == 0, err
    assert maker.asked == [["s3://bucket/model", "--max-model-len", "64", "--port", "99"]]
    # What the engine prints goes elsewhere.
    assert "engine" not in out.splitlines()[0]
    assert "a line of the engine" in err
    assert "and one of its libraries" in err
    assert "a line of the engine" not in out
    assert "libraries" not in out


def test_all_factors_are_printed_row_by_row(maker: Maker, run: Run) -> None:
    document = json.loads(run(*asked("--json"))[1])
    assert document["key"] == key_of(document["factors"])
    out = run(*asked())[1].splitlines()
    assert out[0] == f"key {document['key']}"
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out[2:]}
    assert rows["limits.max_model_len"] == "64"
    assert rows["engine.factors.VLLM_X"] == "1"
    assert rows["engine.factors.VLLM_Y.deep"] == "[1, 2]"
    assert rows["engine.name"] == "engine"


def test_two_pods_are_compared(maker: Maker, run: Run, tmp_path: Path) -> None:
    files = []
    for length in (64, 128):
        files.append(tmp_path / f"{length}.json")
        files[-1].write_text(run(*asked("--json", length=length))[1])
    code, out, _ = run("diff", str(files[0]), str(files[1]))
    assert (code, out.splitlines()) == (0, ["limits.max_model_len: 64 | 128"])
    assert run("diff", str(files[0]), str(files[0]))[1].splitlines() == ["no difference"]


def test_what_cannot_be_asked_is_said(maker: Maker, run: Run, tmp_path: Path) -> None:
    code, _, err = run("key", "m", "--engine", "other")
    assert (code, "there is test" in err) == (2, True)
    factors = tmp_path / "factors.json"
    factors.write_text(json.dumps(FACTORS))
    code, _, err = run("key", "m", "--factors", str(factors))
    assert (code, "both a command line and --factors" in err) == (2, True)
    maker.installed = False
    code, _, err = run(*asked())
    assert (code, "not installed" in err) == (2, True)
    assert maker.asked == []


def test_factors_of_a_file_and_of_the_machine_alone(run: Run, tmp_path: Path) -> None:
    factors = tmp_path / "factors.json"
    factors.write_text(json.dumps(FACTORS))
    document = json.loads(run("key", "--factors", str(factors), "--json")[1])
    assert document["key"] == key_of(document["factors"])
    alone = json.loads(run("key", "--json")[1])
    assert alone["key"] is None
    assert "hardware.cpu_isa" in alone["factors"]
