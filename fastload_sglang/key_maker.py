"""SGLang for ``fastload cache key``: the factors of a ``sglang serve`` command line.

Found through the entry point group ``fastload.key_makers``. Importing this module imports nothing
of SGLang.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from fastload_common.engine.names import missing
from fastload_common.errors import ConfigError, EngineUnsupportedError, FastloadError
from fastload_sglang import compat

__all__ = ["SglangKeyMaker", "key_maker"]


class SglangKeyMaker:
    """See `fastload_common.engine.key_maker.KeyMaker`."""

    def check(self) -> None:
        if importlib.util.find_spec(compat.ENGINE.package) is None:
            raise EngineUnsupportedError(
                "SGLang is not installed in this environment",
                hint="run `fastload cache key` in the image of the engine",
            )

    def factors(self, arguments: Sequence[str]) -> dict[str, Any]:
        # Patches and the load format, as in each process of the engine.
        compat.LOAD_PLUGINS.get()()
        faults = missing(
            (
                *(name for names in compat.CONFIG_NAMES.values() for name in names),
                *compat.COMPILE_NAMES[compat.LAUNCH.module],
                *compat.KEY_MAKER_NAMES,
            )
        )
        if faults:
            raise compat.ENGINE.unsupported(faults)
        from fastload_sglang.compile_factors import factors_of
        from fastload_sglang.compile_ranks import ranks_here

        decided = _decided(list(arguments))
        return factors_of(decided, ranks_here(decided))


def _decided(arguments: list[str]) -> Any:
    """As the process has them that starts the ranks."""
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--model-path")
    try:
        server_args = compat.PREPARE.get()(arguments)
    except SystemExit as error:  # it has said why
        raise ConfigError("sglang serve refuses these arguments") from error
    try:
        server_args.resolve_once()
        compat.SET_VARIABLES.get()(server_args)
        server_args.check_server_args()
    except FastloadError:
        raise
    except Exception as error:
        raise ConfigError(
            f"SGLang refuses these arguments: {type(error).__name__}: {error}"
        ) from error
    return server_args


key_maker = SglangKeyMaker()
