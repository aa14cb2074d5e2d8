"""Builds engine configurations in the real vLLM and says what came out. Not a test itself.

    python config_worker.py SCENARIO JSON

prints one JSON object on its last line. A scenario runs in a process of its own, because
vLLM warns at import and keeps state in its modules.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any


def attempt(**arguments: Any) -> dict[str, Any]:
    """What the configuration says, or the error that building it raised."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(
            **{"enforce_eager": True, "max_model_len": 64} | arguments
        ).create_engine_config()
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    speculative = config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    return {
        "model": config.model_config.model,
        "model_weights": config.model_config.model_weights,
        "tokenizer": config.model_config.tokenizer,
        "load_format": config.load_config.load_format,
        "served_model_name": config.model_config.served_model_name,
        "untied": config.model_config.word_embeddings_untied_by_checkpoint,
        "dtype": str(config.model_config.dtype),
        "draft": None if draft is None else [draft.model, draft.model_weights],
    }


def many(job: dict[str, Any]) -> dict[str, Any]:
    """All of the job's configurations, and what the plugin did to this process."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)
    made = {name: attempt(**arguments) for name, arguments in job.items()}
    loaders_imported = "vllm.model_executor.model_loader" in sys.modules

    import vllm.model_executor.model_loader as loaders
    from vllm.config.load import LoadConfig
    from vllm.config.model import ModelConfig

    import fastload_vllm

    method = ModelConfig.maybe_pull_model_tokenizer_for_runai
    for _ in range(2):
        fastload_vllm.register()
    made["process"] = {
        "loaders_imported_before": loaders_imported,
        "loader": type(loaders.get_model_loader(LoadConfig(load_format="fastload"))).__name__,
        "patched_once": ModelConfig.maybe_pull_model_tokenizer_for_runai is method,
        "overwritten": sum("already registered" in text for text in records),
        "hub": [text for text in records if "huggingface" in text.lower()],
    }
    return made


def unsupported(job: dict[str, Any]) -> dict[str, Any]:
    """A vLLM in which one method has other parameters, and one loader function is gone."""
    import vllm.config.model
    import vllm.engine.arg_utils

    original = vllm.config.model.ModelConfig.maybe_pull_model_tokenizer_for_runai

    def changed(self: Any, uri: str, tokens: str) -> Any:
        return original(self, uri, tokens)

    vllm.config.model.ModelConfig.maybe_pull_model_tokenizer_for_runai = changed
    made = {name: attempt(**arguments) for name, arguments in job.items()}

    import vllm.model_executor.model_loader as loaders
    from vllm.config.load import LoadConfig

    del sys.modules["vllm.model_executor.model_loader.default_loader"].DefaultModelLoader.Source
    try:
        loaders.get_model_loader(LoadConfig(load_format="fastload"))
    except Exception as error:
        made["loader"] = {"error": type(error).__name__, "message": str(error)}
    return made


def filtered(job: dict[str, Any]) -> dict[str, Any]:
    """What a process says in which VLLM_PLUGINS leaves the plugin out."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    made = {"ours": sorted(name for name in sys.modules if name.startswith("fastload"))}
    try:
        get_model_loader(LoadConfig(load_format="fastload"))
    except ValueError as error:
        made["error"] = [str(error)]
    return made


if __name__ == "__main__":
    scenario, job = sys.argv[1], json.loads(sys.argv[2])
    result = {"many": many, "unsupported": unsupported, "filtered": filtered}[scenario](job)
    print(json.dumps(result), flush=True)
    # vLLM's helper threads must not hold this process.
    os._exit(0)
