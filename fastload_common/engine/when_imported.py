"""Do something right after a module was imported, without importing it.

An engine's model loaders take a second to import and not all of its processes need them, so what
they need is put right when, and where, that package is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once: now if the module is there, else at the end of its import.

    Args:
        name: dotted name of the module.
        action: must not raise; an error would be the importing code's.
    """
    if name in sys.modules:
        action()
        return
    if any(isinstance(f, _Watch) and f.name == name for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _Watch(name, action))


class _Watch(MetaPathFinder):
    """Sees the import of one module, once; every other one passes by."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        # Out of the way first: the search goes on with the finders behind.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._action)
        return spec


class _Then(Loader):
    """Loads with the module's own loader, then acts."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What inspects the module later (sources, resources) must find its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()
