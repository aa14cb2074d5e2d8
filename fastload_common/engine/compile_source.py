"""Which code an engine traces, where its version does not say it: local edits, other packages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path

__all__ = ["extensions_of", "source_digest"]

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]+\(?([\w \t,]*)|import[ \t]+([.\w]+))",
    re.MULTILINE,
)
_OURS = "fastload"


def source_digest(modules: Iterable[str], package: str) -> str | None:
    """Digest of these modules and of all that they import from the package; None without any.

    Nothing is imported: files are found beside that of the package, and read.

    Args:
        modules: full names, below the package.
        package: what lies outside it is not looked at.
    """
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent
    texts: dict[str, bytes] = {}
    left = list(modules)
    while left:
        name = left.pop()
        file = _file_of(name, package, home)
        if name in texts or file is None:
            continue
        texts[name] = file.read_bytes()
        inside = name if file.name == "__init__.py" else name.rpartition(".")[0]
        left += _imported(texts[name].decode("utf-8", "replace"), inside, package)
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


def _file_of(name: str, package: str, home: Path) -> Path | None:
    if not name.startswith(f"{package}."):
        return None
    path = home.joinpath(*name.removeprefix(f"{package}.").split("."))
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _imported(text: str, inside: str, package: str) -> Iterator[str]:
    for source, names, whole in _IMPORT.findall(text):
        module = whole or source
        if module.startswith("."):
            dots = len(module) - len(module.lstrip("."))
            parts = inside.split(".")[: len(inside.split(".")) - dots + 1]
            module = ".".join([*parts, *filter(None, module.lstrip(".").split("."))])
        if not f"{module}.".startswith(f"{package}."):
            continue
        yield module
        yield from (f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip())
