"""Draft models beside their target in the real engine. In the worker."""

from __future__ import annotations

from typing import Any

import torch

from tests.cases.engine_models import last_report, load, numbered_bytes
from tests.cases.engine_ranks import Layout, engine_config, rank_of
from tests.vllm.equivalence_worker import state_of


def draft_config(config: Any) -> Any:
    """The engine's configuration while a draft is built; as its proposers make it."""
    from vllm.config.utils import replace

    own = config.speculative_config
    return replace(
        config, parallel_config=own.draft_parallel_config, model_config=own.draft_model_config
    )


def both(
    model: str, load_format: str, speculative: dict[str, Any], layout: Layout, rank: int
) -> dict[str, Any]:
    """State and report of the target and of its draft, loaded as one engine loads them."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    config = engine_config(
        model, load_format, layout, speculative_config=speculative, dtype="float32"
    )
    fast = load_format == "fastload"
    found: dict[str, Any] = {}
    with rank_of(layout, rank, config):
        target = load(config)
        found |= {"target": state_of(target), "target_held_bytes": numbered_bytes(target)}
        found["target_report"] = last_report() if fast else None
        found["model_bytes"] = found["target_report"]["model_bytes"] if fast else None
        own = draft_config(config)
        draft = load_as(own, get_draft_load_config(config))
        found |= {"draft": state_of(draft), "draft_held_bytes": numbered_bytes(draft)}
        found["draft_report"] = last_report() if fast else None
    return found


def load_as(config: Any, load_config: Any) -> torch.nn.Module:
    """Load with another configuration than the engine's own, which stays the current one."""
    config.compilation_config.static_forward_context.clear()
    return load(config, load_config)


def compare_drafts(
    wanted: dict[str, Any],
    asked: dict[str, Any],
    ranks: list[int],
    layout: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Load both models by the default loader as `wanted` says, and by fastload as `asked` says.

    Both hold ``model`` and ``speculative``.
    """
    found = []
    for rank in ranks:
        default = both(load_format="auto", layout=Layout(**(layout or {})), rank=rank, **wanted)
        fast = both(load_format="fastload", layout=Layout(**(layout or {})), rank=rank, **asked)
        row = {part: fast.pop(part) == default.pop(part) for part in ("target", "draft")}
        found.append(fast | {f"{part}_equal": equal for part, equal in row.items()})
    return found


def refused(
    model: str, load_format: str, speculative: dict[str, Any], layout: dict[str, Any] | None = None
) -> str:
    """The class and message of the error of an engine with such a draft, or ``loaded``."""
    try:
        both(model, load_format, speculative, Layout(**(layout or {})), 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"
