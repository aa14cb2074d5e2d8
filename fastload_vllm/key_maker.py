"""vLLM for ``fastload cache key``: the factors of a ``vllm serve`` command line.

Found through the entry point group ``fastload.key_makers``. Importing this module imports nothing
of vLLM.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from fastload_common.errors import ConfigError, EngineUnsupportedError
from fastload_vllm import compat
from fastload_vllm.planning import said

__all__ = ["VllmKeyMaker", "key_maker"]


class VllmKeyMaker:
    """See `fastload_common.engine.key_maker.KeyMaker`."""

    def check(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise EngineUnsupportedError(
                "vllm is not installed in this environment",
                hint="run `fastload cache key` where vLLM is installed: in the engine's image",
            )

    def factors(self, arguments: Sequence[str]) -> dict[str, Any]:
        import fastload_vllm
        from fastload_vllm.compile_factors import factors_of
        from fastload_vllm.plugin import use_compile_cache

        fastload_vllm.register()
        use_compile_cache()
        faults = compat.missing(
            (*compat.CONFIG_NAMES, *compat.COMPILE_NAMES, *compat.KEY_MAKER_NAMES)
        )
        if faults:
            raise compat.unsupported(faults)
        return factors_of(_configuration(list(arguments)))


def _configuration(arguments: list[str]) -> Any:
    """As the process has it that makes the executor."""
    parser = compat.ARGUMENT_PARSER.get()(prog="vllm")
    compat.SERVE_COMMAND.get()().subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        given = parser.parse_args(["serve", *arguments])
    except SystemExit as error:  # it has said why
        raise ConfigError("vllm serve refuses these arguments") from error
    given.model = given.model_tag or given.model
    try:
        engine = compat.ENGINE_ARGUMENTS.get().from_cli_args(given)
        config = engine.create_engine_config(
            usage_context=compat.USAGE.get().OPENAI_API_SERVER, headless=given.headless
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vLLM refuses this configuration: {said(error)}") from error
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and not config.model_config.is_moe:
        parallel.reconfigure_for_independent_dp_rank()
    return config


key_maker = VllmKeyMaker()
