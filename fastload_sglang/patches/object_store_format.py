"""`handle_load_format`: object-store models keep the load format that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastload_common.engine.names import LOAD_FORMAT
from fastload_common.engine.patch import Patch
from fastload_sglang import compat
from fastload_sglang.wishes import wish_of

__all__ = ["PATCH"]


def _resolve(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    wish = wish_of(server_args)
    result = original(server_args, *args, **kwargs)
    asked: dict[str, str] = {}
    if wish.fastload:
        asked["load_format"] = LOAD_FORMAT
    if wish.fastload_draft:
        asked["speculative_draft_load_format"] = LOAD_FORMAT
    if asked:
        compat.DECLARE.get()(server_args, "fastload", **asked)
    return result


PATCH = Patch(
    name="object-store-format",
    target=compat.RESOLVE_FORMAT,
    reason="SGLang gives every object-store model the load format runai_streamer, whatever was "
    "asked for.",
    ends="It does so only for load format auto.",
    wrapper=_resolve,
)
