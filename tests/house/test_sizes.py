"""Files and functions stay small, and names say what things are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.tree import PACKAGES, python_files, relative

FILE_LINES = 400
FUNCTION_LINES = 50

# Exceptions with their present length. Entries may shrink or go, never grow or come.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def functions(path: Path) -> list[tuple[str, int]]:
    """Name with its position -> lines, decorators not counted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (f"{relative(path)}::{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_files_are_short() -> None:
    lines = {relative(path): len(path.read_text().splitlines()) for path in python_files()}
    long = {name: count for name, count in lines.items() if count > FILE_LINES}
    assert not {n: c for n, c in long.items() if c > LONG_FILES.get(n, 0)}, (
        f"files of more than {FILE_LINES} lines; split them"
    )
    assert set(LONG_FILES) <= set(long), "remove what is short now from LONG_FILES"


def test_functions_are_short() -> None:
    counts = dict(item for path in python_files() for item in functions(path))
    long = {name: count for name, count in counts.items() if count > FUNCTION_LINES}
    assert not {n: c for n, c in long.items() if c > LONG_FUNCTIONS.get(n, 0)}, (
        f"functions of more than {FUNCTION_LINES} lines; split them"
    )
    assert set(LONG_FUNCTIONS) <= set(long), "remove what is short now from LONG_FUNCTIONS"


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "shared"}
    named = [relative(path) for path in python_files() if path.stem.lower() in drawers]
    assert named == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_shipped_module_says_what_it_guarantees(package: str) -> None:
    silent = []
    for path in python_files(package):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if len(docstring.split()) < 4:
            silent.append(relative(path))
    assert silent == []


def test_public_classes_and_functions_have_docstrings() -> None:
    silent = []
    for package in PACKAGES:
        for path in python_files(package):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in tree.body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name[0] == "_":
                    continue
                if not ast.get_docstring(node):
                    silent.append(f"{relative(path)}::{node.name}")
    assert silent == []
