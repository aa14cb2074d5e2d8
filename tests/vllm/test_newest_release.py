"""Every name of vLLM that is touched stands in the source of the newest release, and here.

Nothing is imported: the source is parsed.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from fastload_vllm import compat


@dataclass(frozen=True)
class Source:
    """The source of one vLLM, below the directory that holds the package."""

    root: Path

    def lookup(self, module: str, path: str) -> ast.AST | None:
        """The definition of a name, also where a module takes it from another one."""
        body: list[ast.stmt] = parsed(self._file(module)).body
        node: ast.AST | None = None
        for part in path.split("."):
            node = definition(body, part)
            if isinstance(node, ast.ImportFrom):
                return self.lookup(str(node.module), path)
            body = node.body if isinstance(node, ast.ClassDef) else []
        return node

    def _file(self, module: str) -> Path:
        base = self.root.joinpath(*module.split("."))
        return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def bound(node: ast.stmt) -> set[str]:
    """The names that one statement binds, as far as they matter here."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.AnnAssign):
        return {getattr(node.target, "id", "")}
    if isinstance(node, ast.Assign):
        return {getattr(target, "id", "") for target in node.targets}
    return set()


def definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    """The last statement of a body that binds the name; those under ``if`` and ``try`` count."""
    found: ast.AST | None = None
    for node in body:
        if name in bound(node):
            found = node
        elif isinstance(node, ast.If | ast.Try):
            found = definition([*node.body, *node.orelse], name) or found
    return found


def accepts(node: ast.AST, wanted: tuple[str, ...]) -> bool:
    """Whether a definition takes the parameters, in order, and needs no other one."""
    if isinstance(node, ast.ClassDef):
        constructor = definition(node.body, "__init__")
        return constructor is not None and accepts(constructor, wanted)
    if not isinstance(node, ast.FunctionDef):
        return False
    positional = [*node.args.posonlyargs, *node.args.args]
    without_default = positional[: len(positional) - len(node.args.defaults)]
    required = [a.arg for a in without_default if a.arg != "self"]
    required += [
        argument.arg
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is None
    ]
    names = [a.arg for a in (*positional, *node.args.kwonlyargs) if a.arg in wanted]
    return tuple(names) == wanted and set(required) <= set(wanted)


def faults(source: Source) -> list[str]:
    found = []
    for name in (*compat.NAMES, *compat.FIELDS):
        node = source.lookup(name.module, name.path)
        if node is None:
            found.append(f"{name.dotted} is gone")
        elif name.parameters is not None and not accepts(node, name.parameters):
            found.append(f"{name.dotted} does not take {name.parameters}")
    return found


@pytest.fixture(scope="session")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The newest release, installed without its dependencies (some 350 MB)."""
    root = tmp_path_factory.mktemp("newest-vllm")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"),
            *("--disable-pip-version-check", "--target", str(root), "vllm"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"pip cannot get vllm: {done.stderr.strip()[-300:]}")
    return Source(root)


def test_the_newest_release_has_every_name(newest: Source) -> None:
    assert faults(newest) == []


def test_the_installed_release_has_every_name() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    assert faults(Source(Path(spec.origin).parent.parent)) == []


def test_a_missing_name_and_a_changed_signature_are_seen(tmp_path: Path) -> None:
    """The check can fail: it is run against a package that has hardly anything."""
    wanted = compat.PULL_METADATA
    for name in (*compat.NAMES, *compat.FIELDS):
        file = tmp_path.joinpath(*name.module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    for package in tmp_path.rglob("*"):
        if package.is_dir():
            (package / "__init__.py").touch()
    owner, method = wanted.path.split(".")
    file = tmp_path.joinpath(*wanted.module.split(".")).with_suffix(".py")
    file.write_text(f"class {owner}:\n    def {method}(self, model, tokenizer): ...\n")
    without = faults(Source(tmp_path))
    assert not any(wanted.dotted in fault for fault in without)
    assert f"{compat.REGISTER_LOADER.dotted} is gone" in without
    parsed.cache_clear()
    file.write_text(f"class {owner}:\n    def {method}(self, model, tokenizer, more): ...\n")
    assert any(wanted.dotted in fault for fault in faults(Source(tmp_path)))
    parsed.cache_clear()
