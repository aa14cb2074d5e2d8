"""What both adapters need stands once, in the common layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import ROOT

BLOCK_LINES = 6


def blocks(directory: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each run of lines that say something, and where it begins; imports may be the same."""
    for file in sorted(directory.rglob("*.py")):
        lines = [
            (number, line.strip())
            for number, line in enumerate(file.read_text().splitlines(), start=1)
            if line.strip() and not line.startswith(("import ", "from ", "__all__"))
        ]
        for start in range(len(lines) - BLOCK_LINES + 1):
            run = lines[start : start + BLOCK_LINES]
            yield (
                tuple(line for _, line in run),
                f"{file.relative_to(directory.parent)}:{run[0][0]}",
            )


def shared(first: Path, second: Path) -> list[tuple[str, str]]:
    known = dict(blocks(first))
    return [(known[block], place) for block, place in blocks(second) if block in known]


def test_no_six_lines_stand_in_both() -> None:
    assert shared(ROOT / "fastload_vllm", ROOT / "fastload_sglang") == []


def test_six_lines_that_stand_in_both_are_found(tmp_path: Path) -> None:
    text = "\n".join(f"line_{number} = {number}" for number in range(BLOCK_LINES))
    for name, start in (("a", "x = 1\n"), ("b", "import os\n\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.py").write_text(start + text)
    assert shared(tmp_path / "a", tmp_path / "b") == [("a/part.py:2", "b/part.py:3")]
