"""Directories of one start's compiled artefacts: one for each key, so that none holds another's.

An engine, torch and the other compilers of a process are sent there by their own variables. What
the operator has set stays; what a library, or an earlier start, has set for itself does not.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastload_common.config import Settings, environment, provide_variables
from fastload_common.engine.cache_roots import CacheRoot
from fastload_common.engine.compile_place import Place, take_place
from fastload_common.errors import ConfigError
from fastload_common.load.cache_root import cache_roots, private_directory, temporary_root

__all__ = ["Directories", "prepare_directories"]

_KEY_DIGITS = 32
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
_BELOW = "compile"
_PART = re.compile(r"[^a-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Directories:
    """Where the artefacts of one start are.

    Attributes:
        place: of this key, held by this start alone.
        roots: name -> directory, as `CompileCache.restore` wants them.
        variables: that were set in this process.
        given: name -> value of those that the operator had set.
    """

    place: Place
    roots: dict[str, Path]
    variables: dict[str, str]
    given: dict[str, str]

    @property
    def base(self) -> Path:
        """This user's alone, and only this start's while its process lives."""
        return self.place.path

    def names(self) -> set[tuple[str, str]]:
        """Root and name of each file that is there now."""
        found: set[tuple[str, str]] = set()
        for root, directory in self.roots.items():
            for where, _, files in os.walk(directory):
                below = Path(where).relative_to(directory)
                found.update((root, (below / name).as_posix()) for name in files)
        return found

    def close(self) -> None:
        """Let others have the directory."""
        self.place.close()


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
    place = _place(key, settings)
    roots: dict[str, Path] = {}
    variables: dict[str, str] = {}
    given: dict[str, str] = {}
    for root in layout:
        if not root.variables:
            continue
        found = next((name for name in root.variables if environ.get(name)), root.variables[0])
        value = environ.get(found, "")
        if not value or _is_made_up(found, value, made_up or {}) or _is_ours(value, settings):
            found, value = root.variables[0], str(place.path / root.name)
            variables[found] = value
        else:
            given[found] = value
        for part in root.below or ("",):
            name = f"{root.name}.{_PART.sub('-', part.lower()).strip('-.')}" if part else root.name
            roots[name] = Path(value) / part
    provide_variables(variables)
    return Directories(place, roots, variables, given)


def _place(key: str, settings: Settings) -> Place:
    error: OSError | None = None
    for root in cache_roots(settings):
        try:
            if root == temporary_root():  # anybody can know its name, and have made it
                private_directory(root)
            return take_place(root / _BELOW, key[:_KEY_DIGITS])
        except OSError as caught:
            error = caught
    raise ConfigError(
        "there is no directory for compiled artefacts",
        hint="set FASTLOAD_CACHE_DIR to one that this user can write",
        last=f"{error}",
    )


def _is_ours(value: str, settings: Settings) -> bool:
    """Whether an earlier start set it, in this process or in one above it: for another key."""
    return any(root / _BELOW in Path(value).parents for root in cache_roots(settings))


def _is_made_up(name: str, value: str, made_up: Mapping[str, str]) -> bool:
    """Whether no operator chose it. torch writes its default into the environment."""
    if made_up.get(name) == value:
        return True
    path = Path(value)
    # A process above this one may have had another directory for what is temporary.
    of_torch = (Path(tempfile.gettempdir()), *_TEMPORARY)
    return any(
        parent.parent in of_torch and parent.name.startswith("torchinductor_")
        for parent in (path, *path.parents)
    )
