"""The project's files, as the house rules see them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fastload_common", "fastload_vllm", "fastload_sglang")
_NOT_OURS = {".git", "__pycache__", "build", "dist", ".ci"}


def relative(path: Path) -> str:
    """A path as the messages show it."""
    return path.relative_to(ROOT).as_posix()


def project_files() -> list[Path]:
    """Every file that git tracks or would track; without git, every file that looks like it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
        return sorted(path for path in paths if path.is_file())
    # An unpacked archive has no git directory.
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in _NOT_OURS or part.startswith(".venv") for part in path.parts)
    )


def python_files(below: str = "") -> list[Path]:
    """The Python files among them, all or those below one top-level directory."""
    return [
        path
        for path in project_files()
        if path.suffix == ".py" and (not below or relative(path).startswith(f"{below}/"))
    ]
