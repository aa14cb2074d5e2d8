"""The form of a patch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastload_vllm.compat import Name

__all__ = ["Patch"]

_MARK = "__fastload_original__"


@dataclass(frozen=True, slots=True)
class Patch:
    """One method of vLLM, replaced by a wrapper.

    Attributes:
        name: for logs and the reference page.
        target: the method.
        reason: why it must be, in a sentence.
        ends: what in vLLM would make it needless.
        wrapper: called as ``wrapper(original, *args, **kwargs)``.
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
        """Replace the method; False where it does not apply or is done already.

        Raises:
            EngineUnsupportedError: the target is gone.
        """
        if not self.applies() or self.applied():
            return False
        original = self.target.get()
        wrapper = self.wrapper

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(patched, _MARK, original)
        setattr(*self._place(), patched)
        return True

    def revert(self) -> bool:
        """Put the original back (tests); False where it was not applied."""
        if not self.applied():
            return False
        setattr(*self._place(), getattr(self.target.get(), _MARK))
        return True

    def _place(self) -> tuple[Any, str]:
        owner, _, attribute = self.target.path.rpartition(".")
        return Name(self.target.module, owner, self.target.why).get(), attribute
