"""Names of an engine that an adapter touches, each probed before use; versions are not compared.

A name that is gone, or whose parameters changed, makes the engine unsupported, and the error
lists what is missing.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastload_common.errors import EngineUnsupportedError

__all__ = ["LOAD_FORMAT", "Engine", "Name", "missing"]

LOAD_FORMAT = "fastload"
"""What an operator asks an engine for."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Which engine an adapter is for.

    Attributes:
        title: as its makers write it.
        package: its import name; also that of its command and its adapter's, ``fastload_*``.
        advice: which of its versions to install.
        logger: the logger that it configures; empty for the root's.
        log_level_variable: says how much it logs; empty where there is none.
    """

    title: str
    package: str
    advice: str
    logger: str
    log_level_variable: str = ""

    def version(self) -> str:
        """Its version, whatever its distribution is called."""
        try:
            return str(importlib.import_module(self.package).__version__)
        except (ImportError, AttributeError):
            return "unknown"

    def unsupported(self, faults: Iterable[str]) -> EngineUnsupportedError:
        """The one error for an engine that lacks something."""
        return EngineUnsupportedError(
            f"this {self.title} is not supported: missing " + "; ".join(faults),
            hint=self.advice,
            **{self.package: self.version()},
        )


@dataclass(frozen=True, slots=True)
class Name:
    """One name of an engine.

    Attributes:
        engine: whose.
        module: dotted module.
        path: attributes below it, e.g. ``ModelConfig.model_weights``.
        why: what it is needed for.
        parameters: names that its signature must have, in this order, ``self`` and ``cls`` left
            out; None for what is not called.
        since: first version of the engine in which it was seen.
        front: whether only some processes (API server, command line) have the module; it is then
            probed only where the module is imported already.
    """

    engine: Engine
    module: str
    path: str
    why: str
    parameters: tuple[str, ...] | None = None
    since: str = ""
    front: bool = False

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.path}"

    @property
    def fault(self) -> str:
        """What to say where it is missing."""
        return f"{self.dotted} ({self.why})"

    def get(self) -> Any:
        """The object itself.

        Raises:
            EngineUnsupportedError: it is not there.
        """
        value: Any = None
        try:
            value = importlib.import_module(self.module)
            for part in self.path.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            raise self.engine.unsupported([self.fault]) from error
        return value

    def place(self) -> tuple[Any, str]:
        """The object that holds it, and under which attribute.

        Raises:
            EngineUnsupportedError: the holder is not there.
        """
        owner, _, attribute = self.path.rpartition(".")
        if owner:
            return Name(self.engine, self.module, owner, self.why).get(), attribute
        try:
            return importlib.import_module(self.module), attribute
        except ImportError as error:
            raise self.engine.unsupported([self.fault]) from error


def missing(names: Iterable[Name]) -> list[str]:
    """What the engine lacks, each with its reason; empty when all is there.

    Imports the modules that hold the names, except those of the front end.
    """
    faults = []
    for name in names:
        if name.front and name.module not in sys.modules:
            continue
        try:
            value = name.get()
        except EngineUnsupportedError:
            faults.append(name.fault)
            continue
        if name.parameters is not None and not _accepts(value, name.parameters):
            faults.append(f"{name.dotted}({', '.join(name.parameters)}) ({name.why})")
    return faults


def _accepts(value: Any, wanted: tuple[str, ...]) -> bool:
    """Whether the wanted parameters are there, in order, and no other one must be given."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return False
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    names = [p.name for p in parameters if p.name in wanted]
    others = [p for p in parameters if p.name not in wanted]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(names) == wanted and all(
        p.default is not inspect.Parameter.empty or p.kind in variadic for p in others
    )
