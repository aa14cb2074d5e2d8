"""Looks up names of an engine in its source, which is parsed and not imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastload_common.engine.names import Name

__all__ = ["Source", "faults", "installed_into"]


@dataclass(frozen=True)
class Source:
    """The source of one engine, below the directory that holds the package."""

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
    """The syntax tree of a file; parsed once."""
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
    required = [a.arg for a in without_default if a.arg not in ("self", "cls")]
    required += [
        argument.arg
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if default is None
    ]
    names = [a.arg for a in (*positional, *node.args.kwonlyargs) if a.arg in wanted]
    return tuple(names) == wanted and set(required) <= set(wanted)


def faults(source: Source, names: Iterable[Name]) -> list[str]:
    """Which of the names are gone, or take other parameters."""
    found = []
    for name in names:
        node = source.lookup(name.module, name.path)
        if node is None:
            found.append(f"{name.dotted} is gone")
        elif name.parameters is not None and not accepts(node, name.parameters):
            found.append(f"{name.dotted} does not take {name.parameters}")
    return found


def installed_into(directory: Path, requirement: str) -> str | None:
    """Install a release without its dependencies; why not, where pip cannot."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"),
            *("--disable-pip-version-check", "--target", str(directory), requirement),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    return f"pip cannot get {requirement}: {done.stderr.strip()[-300:]}"
