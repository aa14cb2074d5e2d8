"""Directories of one start's compiled artefacts: one for each key, so that none holds another's.

An engine, torch and the other compilers of a process are sent there by their own variables. What
the operator has set stays; what a library has set for itself does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastload_common.config import Settings, environment, provide_variables
from fastload_common.engine.cache_roots import CacheRoot
from fastload_common.errors import ConfigError
from fastload_common.load.cache_root import cache_roots, private_directory

__all__ = ["Directories", "prepare_directories"]

_KEY_DIGITS = 32
_KEPT = 4
"""Directories of other keys that stay: engines that are started in turn find theirs again."""
_LOCK = ".lock"
_PART = re.compile(r"[^a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Directories:
    """Where the artefacts of one start are.

    Attributes:
        base: of this key; this user's alone.
        roots: name -> directory, as `CompileCache.restore` wants them.
        variables: that were set in this process.
        given: name -> value of those that the operator had set.
    """

    base: Path
    roots: dict[str, Path]
    variables: dict[str, str]
    given: dict[str, str]
    lock: int

    def names(self) -> set[tuple[str, str]]:
        """Root and name of each file that is there now."""
        found: set[tuple[str, str]] = set()
        for root, directory in self.roots.items():
            for where, _, files in os.walk(directory):
                below = Path(where).relative_to(directory)
                found.update((root, (below / name).as_posix()) for name in files)
        return found

    def close(self) -> None:
        """Let others remove the directory."""
        os.close(self.lock)


def prepare_directories(
    layout: Iterable[CacheRoot],
    key: str,
    settings: Settings,
    *,
    made_up: Mapping[str, str] | None = None,
) -> Directories:
    """Make this key's directory and set the variables that lead there.

    Args:
        layout: roots of the engine; those without a variable are not moved and not packed.
        key: of the artefacts.
        settings: where fastload keeps things.
        made_up: variable -> value that the engine sets where the operator has not.

    Raises:
        ConfigError: there is no place for it.
    """
    environ = environment()
    base = _base(key, settings)
    roots: dict[str, Path] = {}
    variables: dict[str, str] = {}
    given: dict[str, str] = {}
    for root in layout:
        if not root.variables:
            continue
        found = next((name for name in root.variables if environ.get(name)), root.variables[0])
        value = environ.get(found, "")
        if not value or _is_made_up(found, value, made_up or {}):
            found, value = root.variables[0], str(base / root.name)
            variables[found] = value
        else:
            given[found] = value
        for part in root.below or ("",):
            name = f"{root.name}.{_PART.sub('-', part.lower()).strip('-.')}" if part else root.name
            roots[name] = Path(value) / part
    provide_variables(variables)
    # Opened for good: whoever tidies up leaves a directory that is in use.
    lock = os.open(base / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(base)
        _tidy(base)
    return Directories(base, roots, variables, given, lock)


def _base(key: str, settings: Settings) -> Path:
    error: OSError | None = None
    for root in cache_roots(settings):
        path = root / "compile"
        try:
            private_directory(path)
            base = path / key[:_KEY_DIGITS]
            base.mkdir(mode=0o700, exist_ok=True)
        except OSError as caught:
            error = caught
            continue
        return base
    raise ConfigError(
        "there is no directory for compiled artefacts",
        hint="set FASTLOAD_CACHE_DIR to one that this user can write",
        last=f"{error}",
    )


def _is_made_up(name: str, value: str, made_up: Mapping[str, str]) -> bool:
    """Whether no operator chose it. torch writes its default into the environment."""
    if made_up.get(name) == value:
        return True
    path = Path(value)
    of_torch = Path(tempfile.gettempdir())
    return any(
        parent.parent == of_torch and parent.name.startswith("torchinductor_")
        for parent in (path, *path.parents)
    )


def _tidy(base: Path) -> None:
    """Remove the directories of keys that nobody has used for longest."""
    others = [path for path in _siblings(base) if path != base]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[_KEPT:]:
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _siblings(base: Path) -> Iterator[Path]:
    for path in base.parent.iterdir():
        if re.fullmatch(rf"[0-9a-f]{{{_KEY_DIGITS}}}", path.name) and path.is_dir():
            yield path
