"""Which code an engine traces, where its version does not say it: local edits, other packages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata, util
from pathlib import Path

__all__ = ["extensions_of", "source_digest"]

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+\(?([\w \t,]*)|import[ \t]+([.\w]+))",
    re.MULTILINE,
)
_PACKAGE = "__init__.py"
_OURS = "fastload"


def source_digest(modules: Iterable[str], packages: Iterable[str]) -> str | None:
    """Digest of these modules and of all that they import from the packages; None without any.

    Nothing is imported but the packages' parents: files are found below them, and read.

    Args:
        modules: full names, below the packages. Of one that is a package itself, all is taken:
            which of it is imported may be for the device to say.
        packages: what lies outside them is not looked at.
    """
    homes = _homes(packages)
    texts: dict[str, bytes] = {}
    left = [inner for name in modules for inner in _with_inner(name, homes)]
    while left:
        name = left.pop()
        file = _file_of(name, homes)
        if name in texts or file is None:
            continue
        texts[name] = file.read_bytes()
        inside = name if file.name == _PACKAGE else name.rpartition(".")[0]
        left += _imported(texts[name].decode("utf-8", "replace"), inside)
    if not texts:
        return None
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}:{len(texts[name])}:".encode() + texts[name])
    return digest.hexdigest()


def extensions_of(groups: Iterable[str], own: Iterable[str], allowed: str | None) -> dict[str, str]:
    """Name and version of the packages whose entry points an engine calls, its own left out.

    Args:
        groups: of entry points.
        own: names of the engine's distributions.
        allowed: names of entry points with commas between, as the engine's variable has them;
            None: all.
    """
    names = None if allowed is None else {name.strip() for name in allowed.split(",")}
    found = {}
    for group in groups:
        for point in metadata.entry_points(group=group):
            if point.dist is None or (names is not None and point.name not in names):
                continue
            if point.dist.name not in (*own, _OURS):
                found[point.dist.name] = point.dist.version
    return found


def _homes(packages: Iterable[str]) -> dict[str, Path]:
    """Package -> its directory; those that this release of the engine lacks are left out."""
    found = {}
    for package in packages:
        try:
            spec = util.find_spec(package)
        except ModuleNotFoundError:
            continue
        if spec is not None and spec.origin is not None:
            found[package] = Path(spec.origin).parent
    return found


def _path_of(name: str, homes: Mapping[str, Path]) -> Path | None:
    for package, home in homes.items():
        if name.startswith(f"{package}."):
            return home.joinpath(*name.removeprefix(f"{package}.").split("."))
    return None


def _file_of(name: str, homes: Mapping[str, Path]) -> Path | None:
    path = _path_of(name, homes)
    if path is None:
        return None
    files = (path.with_name(f"{path.name}.py"), path / _PACKAGE)
    return next((file for file in files if file.is_file()), None)


def _with_inner(name: str, homes: Mapping[str, Path]) -> Iterator[str]:
    yield name
    path = _path_of(name, homes)
    if path is not None and (path / _PACKAGE).is_file():
        for file in path.rglob("*.py"):
            parts = file.relative_to(path).with_suffix("").parts
            yield ".".join((name, *(part for part in parts if part != "__init__")))


def _imported(text: str, inside: str) -> Iterator[str]:
    for source, names, whole in _IMPORT.findall(text):
        module = whole or source
        if module.startswith("."):
            dots = len(module) - len(module.lstrip("."))
            parts = inside.split(".")[: len(inside.split(".")) - dots + 1]
            module = ".".join([*parts, *filter(None, module.lstrip(".").split("."))])
        yield module
        yield from (f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip())
