"""One function of an engine, replaced at run time by a wrapper, for a stated reason."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastload_common.engine.names import Name

__all__ = ["Patch", "apply_all"]

_MARK = "__fastload_original__"


@dataclass(frozen=True, slots=True)
class Patch:
    """A wrapper that acts for load format ``fastload`` and calls the original otherwise.

    Attributes:
        name: for logs and the reference page.
        target: a function of a module, or a method or class method of a class.
        reason: why it must be, in a sentence.
        ends: what in the engine would make it needless.
        wrapper: called as ``wrapper(original, *args, **kwargs)``; of a method or class method the
            object or class comes first.
    """

    name: str
    target: Name
    reason: str
    ends: str
    wrapper: Callable[..., Any]

    def applies(self) -> bool:
        """Whether this process has the target. The front end's modules are not imported for it."""
        return not self.target.front or self.target.module in sys.modules

    def applied(self) -> bool:
        return self.applies() and hasattr(self.target.get(), _MARK)

    def apply(self) -> bool:
        """Replace the function; False where it does not apply or is done already.

        Raises:
            EngineUnsupportedError: the target is gone.
        """
        if not self.applies() or self.applied():
            return False
        self.target.get()
        owner, attribute = self.target.place()
        held = vars(owner).get(attribute, getattr(owner, attribute))
        bound = isinstance(held, classmethod)
        original = held.__func__ if bound else held
        wrapper = self.wrapper

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(patched, _MARK, held)
        setattr(owner, attribute, classmethod(patched) if bound else patched)
        return True

    def revert(self) -> bool:
        """Put the original back (tests); False where it was not applied."""
        if not self.applied():
            return False
        setattr(*self.target.place(), getattr(self.target.get(), _MARK))
        return True


def apply_all(patches: Iterable[Patch]) -> list[str]:
    """Apply what applies to this process and is not applied yet; returns those patches' names."""
    return [patch.name for patch in patches if patch.apply()]
