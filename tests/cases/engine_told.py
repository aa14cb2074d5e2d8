"""What the engine and the adapter say to odd checkpoints and odd settings. In the worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.cases.engine_models import load, variables
from tests.cases.engine_ranks import Layout, engine_config, rank_of


@contextmanager
def recorded() -> Iterator[list[str]]:
    """The lines that fastload logs at INFO and above."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("fastload_common")
    handler, level = Keep(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def outcome(
    model: str,
    extra_config: Any = None,
    environ: dict[str, str] | None = None,
    ranks: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Build the configuration and load every rank; ``said`` is an error or ``loaded``."""
    layout = Layout(tensor=ranks)
    said = "loaded"
    with variables(environ or {}), recorded() as lines:
        try:
            more = {} if extra_config is None else {"model_loader_extra_config": extra_config}
            for rank in range(ranks):
                config = engine_config(model, "fastload", layout, **more, **options)
                with rank_of(layout, rank, config):
                    load(config)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return {"said": said, "lines": lines}


def adapter_outcome(path: str) -> str:
    """What a worker says to a LoRA adapter that is named so."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    modules = SimpleNamespace(supported_lora_modules=[], packed_modules_mapping={})
    worker = SimpleNamespace(_adapter_manager=modules, max_position_embeddings=64)
    try:
        WorkerLoRAManager._load_adapter(worker, LoRARequest("tuned", 1, path))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"
