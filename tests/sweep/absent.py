"""Stand-ins for packages that prepare images and sound, where they are not installed.

The engine's modules import them at their top, so without them whole architectures could not be
built; no weight passes through them. Whatever is asked of a stand-in is another stand-in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision", "torchaudio", "librosa", "scipy", "soundfile", "av", "cv2")


def stand_in() -> list[str]:
    """Install them for what is absent; the names are returned.

    Transformers decides first, for good, what it has: it must go on without them.
    """
    import transformers.utils.import_utils as theirs

    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    for name, known in vars(theirs).items():
        if name.startswith("is_") and name.endswith("_available") and callable(known):
            try:
                known()
            except TypeError:  # it takes arguments; not one of those that matter here
                continue
    sys.meta_path.append(_Finder(absent))
    return absent


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: list[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandInModule(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_StandIn,), {})


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_StandIn,), {})


class _StandIn(metaclass=_Meta):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _StandIn()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn()
