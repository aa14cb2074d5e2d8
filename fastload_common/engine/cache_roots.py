"""Where an engine and its libraries keep what they compile: facts as data.

An adapter lists its engine's roots; what is kept of them, under which key, is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastload_common.engine.names import Name

__all__ = ["CacheRoot", "CompletePoint"]


@dataclass(frozen=True, slots=True)
class CacheRoot:
    """One directory.

    Attributes:
        name: for logs and manifests.
        variables: of the environment, the first that is set names the directory.
        default: where it is else: a path; ``{engine}`` stands for the engine's cache directory,
            ``~`` for the home directory.
        below: parts of that directory that hold the artefacts; empty: all of it.
        portable: whether another machine with the same hardware and software can use it.
        note: what must be known of it.
    """

    name: str
    variables: tuple[str, ...]
    default: str
    below: tuple[str, ...] = ()
    portable: bool = True
    note: str = ""

    def directory(self, environ: Mapping[str, str], engine: Path, home: Path) -> Path:
        """Where it is for a process.

        Args:
            environ: the process's variables, when the engine has been imported.
            engine: the engine's cache directory.
            home: of the user.
        """
        for variable in self.variables:
            if environ.get(variable):
                return Path(environ[variable])
        text = self.default.replace("{engine}", str(engine))
        return home / text[2:] if text.startswith("~/") else Path(text)


@dataclass(frozen=True, slots=True)
class CompletePoint:
    """A function of the engine after whose return artefacts are complete.

    Attributes:
        target: the function.
        when: what has been compiled by then.
    """

    target: Name
    when: str
