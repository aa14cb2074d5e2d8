"""Faults as JSON, the command line, and the rig as a process of its own."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from fastload_common.errors import ConfigError
from fastload_common.ranges import ByteRange
from fastload_common.testing.rig import (
    AccessKey,
    Choice,
    Fault,
    FirstByte,
    Garbage,
    Generated,
    Headers,
    Lognormal,
    Rate,
    RigProcess,
    Slower,
    Stall,
)
from fastload_common.testing.rig.__main__ import main
from fastload_common.testing.rig.effects import Effect
from fastload_common.testing.rig.fault_json import dump_faults, fault_to_json, load_faults
from fastload_common.testing.rig.options import faults_of, parser
from tests.common.testing.rig_client import boto_client

DEFAULT_KEY = AccessKey("RIGACCESSKEY", "rig-secret-key")
REQUIRED: dict[str, dict[str, Any]] = {
    "FirstByte": {"seconds": 0.1},
    "Rate": {"bytes_per_s": 5.0},
    "Slower": {"factor": 2.0},
    "Status": {"status": 200},
    "Flip": {"at_byte": 3},
    "Error": {"status": 503},
}


@pytest.mark.parametrize("kind", get_args(Effect))
def test_every_effect_goes_through_json(kind: type[Any]) -> None:
    fault = Fault(kind(**REQUIRED.get(kind.__name__, {})), name="a/*", share=0.5)
    assert load_faults(dump_faults([fault])) == [fault]


def test_conditions_and_odd_values_go_through_json() -> None:
    faults = [
        Fault(FirstByte(Lognormal(0.03, 0.5)), byte_range=ByteRange(5, 9), attempts=(1, 4)),
        Fault(FirstByte(Choice((1.0, 2.0), (3.0, 1.0))), methods=("LIST",), until_s=2.0, seed=3),
        Fault(Garbage(b"\x00\xff")),
        Fault(Headers({"ETag": None, "a": "b"})),
        Fault(Stall(after_bytes=None)),
    ]
    assert load_faults(dump_faults(faults)) == faults
    assert fault_to_json(faults[4]) == {"effect": "Stall", "after_bytes": None}
    with pytest.raises(TypeError, match="function"):
        fault_to_json(replace(faults[4], attempts=lambda attempt: attempt > 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "no JSON"),
        ("{}", "no list"),
        ('[{"effect": "Quake"}]', "'Quake'.*known: FirstByte"),
        ('[{"after_bytes": 1}]', "effect None"),
        ('[{"effect": "Stall", "after_byte": 1}]', "'after_byte'"),
        ('[{"effect": "Rate"}]', "bytes_per_s"),
        ('[{"effect": "Stall", "byte_range": [2, 1]}]', "not a byte range"),
        ('[{"effect": "FirstByte", "seconds": {"normal": {}}}]', "'normal'"),
    ],
)
def test_faults_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_faults(text)


def test_faults_from_options(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text('[{"effect": "Chunked"}]')
    words = "--first-byte-ms 30 --connection-bytes-per-s 90MB --slow-share .1 --slow-factor 3"
    options = parser().parse_args([*words.split(), "--seed", "7", "--faults", str(file)])
    first, rate, slower, chunked = faults_of(options)
    assert first == Fault(FirstByte(0.03), seed=7)
    assert rate == Fault(Rate(90_000_000))
    assert slower == Fault(Slower(3.0), share=0.1, seed=7)
    assert type(chunked.effect).__name__ == "Chunked"
    options = parser().parse_args(["--first-byte-ms", "30", "--first-byte-sigma", ".5"])
    assert faults_of(options) == [Fault(FirstByte(Lognormal(0.03, 0.5)))]
    stalls = faults_of(parser().parse_args(["--stall-share", "0.02"]))
    assert [fault.share for fault in stalls] == [0.01, 0.01]


def talk(*arguments: str, commands: str = "") -> tuple[int, list[Any]]:
    replies = io.StringIO()
    status = main(arguments, io.StringIO(commands), replies)
    return status, [json.loads(line) for line in replies.getvalue().splitlines()]


def test_commands() -> None:
    commands = 'stats\nfaults [{"effect": "Garbage"}]\nlink 5MB\nlink\nrelease\nlog\nclear\nhm\n'
    status, (hello, stats, *answers) = talk(commands=commands + "faults [\n")
    assert status == 0
    assert hello["endpoint"] == f"http://127.0.0.1:{hello['port']}"
    assert hello["environ"]["AWS_ENDPOINT_URL"] == hello["endpoint"]
    assert stats["bytes_sent"] == 0
    assert answers[:6] == [{}, {}, {}, {}, [], {}]
    assert ["error" in answer for answer in answers[6:]] == [True, True]


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("--object", "no-key=5") == (2, [])
    assert "no-key=5" in capsys.readouterr().err


def test_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(b"from a file")
    (tmp_path / "empty").touch()
    with RigProcess("--directory", str(tmp_path), "--object", "b/large=9MiB:5") as rig:
        client = boto_client(rig.endpoint, DEFAULT_KEY)

        def read(bucket: str, key: str) -> object:
            return client.get_object(Bucket=bucket, Key=key)["Body"].read()

        assert read("models", "sub/file") == b"from a file"
        assert read("models", "empty") == b""
        assert read("b", "large") == Generated(9 * 1024 * 1024, seed=5).read()
        assert rig.ask("stats")["requests"] == {"GET": 3}
        assert [row["key"] for row in rig.ask("log")] == ["sub/file", "empty", "large"]
        rig.arrange([Fault(Garbage(), name="b/*")])
        with pytest.raises(Exception, match=r"Connection was closed|BadStatusLine|aborted"):
            read("b", "large")
        client.close()
        with pytest.raises(ConfigError, match="not a command"):
            rig.ask("dance")
    rig.stop()
    with pytest.raises(ConfigError, match="not running"):
        rig.ask("stats")


def test_it_ends_with_its_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastload_common.testing.rig"],
        input="",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert set(json.loads(done.stdout)) == {"port", "endpoint", "environ"}
    assert done.stderr == ""


def test_a_process_that_does_not_start(capfd: pytest.CaptureFixture[str]) -> None:
    rig = RigProcess("--object", "nonsense")
    with pytest.raises(ConfigError, match="has ended"):
        rig.start()
    assert "nonsense" in capfd.readouterr().err
