"""What must not stand in the project, and what must stand at its top."""

from __future__ import annotations

import re

import pytest

from tests.house.tree import ROOT, project_files, relative

TOP_LEVEL = {
    "fastload_vllm",
    "fastload_sglang",
    "fastload_common",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    ".ci",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    ".gitignore",
    ".dockerignore",
    ".pre-commit-config.yaml",
}

# Written in pieces, so that this file does not hold them.
FORBIDDEN = {
    "a directory of somebody's machine": re.compile(
        r"(?<![\w.])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me/[a-z]"]) + r")(?=/|\b)"
    ),
    "a package registry's host": re.compile(
        "|".join(["py" + r"pi\.org", "pythonh" + r"osted\.org", "download\\.py" + r"torch\.org"])
    ),
    "a file beside the project": re.compile(r"\.\./sha" + "red"),
    "the name of a note outside the project": re.compile(
        r"\b(?:"
        + "|".join(["CA" + "SES", "DES" + "IGN", "ENG" + "INES", "TRANS" + r"PORT"])
        + r")\.md"
    ),
    "an AWS access key id": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "a private key": re.compile("BEGIN (?:RSA |EC )?PRIV" + "ATE KEY"),
}


def text_files() -> dict[str, str]:
    found = {}
    for path in project_files():
        try:
            found[relative(path)] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_nothing_forbidden_is_written(what: str) -> None:
    pattern = FORBIDDEN[what]
    found = [
        f"{name}:{number}: {match.group()}"
        for name, text in text_files().items()
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := pattern.search(line))
    ]
    assert found == [], what


def test_the_top_level_is_what_was_agreed() -> None:
    top = {relative(path).partition("/")[0] for path in project_files()}
    assert top <= TOP_LEVEL, f"unexpected: {sorted(top - TOP_LEVEL)}"
    assert top >= TOP_LEVEL - {"benchmarks"}, f"missing: {sorted(TOP_LEVEL - top)}"


def test_the_licence_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_no_file_is_large_or_a_model() -> None:
    suffixes = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".so", ".whl"}
    large = [
        relative(path)
        for path in project_files()
        if path.stat().st_size > 512 * 1024 or path.suffix in suffixes
    ]
    assert large == []


def test_packages_are_typed() -> None:
    for package in ("fastload_common", "fastload_vllm", "fastload_sglang"):
        assert (ROOT / package / "py.typed").is_file()


def test_test_directories_are_no_packages() -> None:
    """Modules are named by their path from the root; an `__init__.py` would cut that path."""
    named = [relative(path) for path in project_files() if path.name == "__init__.py"]
    assert [name for name in named if name.startswith("tests/")] == []
