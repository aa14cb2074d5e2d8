"""`LoadConfig._verify_load_format`: the load format ``fastload`` is our loader's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.engine.patch import Patch
from fastload_sglang import compat

__all__ = ["PATCH"]


def _verify(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(self.load_format, str) and self.load_format.lower() == LOAD_FORMAT:
        # The engine's loaders take a second to import; this process loads a model.
        from fastload_sglang.loader import FastloadModelLoader

        self.load_format = FastloadModelLoader
    return original(self, *args, **kwargs)


PATCH = Patch(
    name="load-format-class",
    target=compat.VERIFY_FORMAT,
    reason="SGLang makes its loader from a class that is given as load format, but accepts no "
    "name for one.",
    ends="Load formats can be registered by name.",
    wrapper=_verify,
)
