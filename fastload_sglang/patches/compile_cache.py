"""The compile cache's places in SGLang; only where a compile cache is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastload_common.engine.patch import Patch
from fastload_sglang import compat

__all__ = ["COMPILE_PATCHES"]

_ENDS = "SGLang can restore and publish what it compiles, under a complete key."


def _launch(
    original: Callable[..., Any], cls: Any, server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    from fastload_sglang.compile_start import begin

    begin(server_args)
    return original(cls, server_args, *args, **kwargs)


def _shutdown(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from fastload_sglang.compile_start import end

    end(getattr(self, "server_args", None), partial(compat.ASK_RANKS.get(), self))
    return original(self, *args, **kwargs)


def _loaded(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from fastload_sglang.compile_rank import wait_restored

    result = original(self, *args, **kwargs)
    wait_restored()
    return result


def _captured(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from fastload_sglang.compile_rank import report

    result = original(self, *args, **kwargs)
    report(is_warm=False)
    return result


def _warm(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    from fastload_sglang.compile_rank import report

    result = original(self, *args, **kwargs)
    report(is_warm=True)
    return result


def _tactics(original: Callable[..., Any], model_runner: Any, *args: Any, **kwargs: Any) -> Any:
    from fastload_sglang.compile_rank import tactics_file

    file = original(model_runner, *args, **kwargs)
    return tactics_file(file, is_draft=bool(model_runner.is_draft_worker))


COMPILE_PATCHES: tuple[Patch, ...] = (
    Patch(
        name="compile-launch",
        target=compat.LAUNCH,
        reason="The one moment at which all arguments are decided and no rank runs: the key is "
        "made, ranks inherit the directories, and restoring begins.",
        ends=_ENDS,
        wrapper=_launch,
    ),
    Patch(
        name="compile-loaded",
        target=compat.MODEL_LOADED,
        reason="Artefacts must be in place before anything is compiled, and not before the "
        "weights are there.",
        ends=_ENDS,
        wrapper=_loaded,
    ),
    Patch(
        name="compile-captured",
        target=compat.CAPTURED,
        reason="A rank says what it has compiled: graphs are captured.",
        ends=_ENDS,
        wrapper=_captured,
    ),
    Patch(
        name="compile-warm",
        target=compat.WARM,
        reason="The same after the server's warm-up request, which compiles more.",
        ends=_ENDS,
        wrapper=_warm,
    ),
    Patch(
        name="compile-shutdown",
        target=compat.SHUTDOWN,
        reason="An engine without a server has no warm-up: it is complete when it ends.",
        ends=_ENDS,
        wrapper=_shutdown,
    ),
    Patch(
        name="compile-tactics",
        target=compat.TACTICS,
        reason="SGLang keeps FlashInfer's choices in a directory that is named by the model's "
        "place and that no variable moves.",
        ends="The directory can be set, and is named by what the model is.",
        wrapper=_tactics,
    ),
)
