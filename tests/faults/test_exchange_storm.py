"""A few loads by ranks of which one is killed, in every run; and whether faults would be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults import run_exchange

SMALL = ["--width", "384", "--layers", "2", "--memory", "1MiB", "--chunk", "128KiB"]


def test_survivors_have_the_right_bytes_or_name_the_killed_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run_exchange.main(["--seeds", "6", *SMALL])
    found = json.loads(capsys.readouterr().out)
    assert found["bad"] == []
    assert status == 0
    assert found["seeds"] == 6
    assert set(found["survivors"]) <= {"right bytes", "PeerError"}


def row(**result: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "error": None,
        "faults": [],
        "threads": [],
        "descriptors": [],
        "failed_s": 10.0,
    }
    return {"status": 1, "hit_s": 8.0, "gone_s": 9.0, "result": {**whole, **result}}


CAUSE = (
    "PeerError: rank 3 (pid 7), which loads together with this one, ended without a word (killed?)"
)


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (row(faults=["layers.0.norm"]), "wrong: layers.0.norm"),
        (row(threads=["fastload-peers"]), "left: ['fastload-peers']"),
        (row(error=CAUSE, failed_s=15.0), "it ended 6.0 s after the killed one"),
        (row(error="PeerError: rank 2 (pid 7) did"), "the cause is not told: PeerError: rank 2"),
        ({"status": -11, "hit_s": 9.0, "result": None}, "it ended with status -11"),
    ],
)
def test_what_is_wrong_is_told(ended: dict[str, Any], fault: str) -> None:
    storm = run_exchange.Storm(Path(), None, "64MiB", "1MiB")  # type: ignore[arg-type]
    assert storm._judge(ended, 3)[0].startswith(fault)
    assert storm._judge(row(error=CAUSE), 3) == []
    assert storm._judge(row(), None) == []
    assert storm._judge(row(error=CAUSE), None)[0].startswith("an error without a cause")
