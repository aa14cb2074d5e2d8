"""Whole models in the real engine, loaded by its default loader and by fastload. In the worker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.cases.engine_kernels import without_kernels
from tests.cases.engine_ranks import Layout, engine_config, rank_of
from tests.vllm.equivalence_worker import state_of

__all__ = ["FIRST_NUMBER", "compare", "compare_ranks", "load_failures", "outcome_of"]

# The elements of a numbered checkpoint are counted from here: exact in F32, and unlike anything
# else that a model holds.
FIRST_NUMBER = 1 << 20
_LAST_NUMBER = 1 << 24


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def load(config: Any, load_config: Any = None, *, processed: bool = False) -> torch.nn.Module:
    """Build a model and load its weights.

    Args:
        processed: whether kernels put the weights into their own form afterwards, as they do
            while serving. Kernels of a GPU cannot, and it hides which elements were loaded.
    """
    from vllm.model_executor.model_loader import get_model, get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    model: torch.nn.Module
    load_config = load_config or config.load_config
    if processed:
        model = get_model(vllm_config=config, load_config=load_config)
        return model
    model_config = config.model_config
    with set_default_torch_dtype(model_config.dtype), without_kernels():
        model = initialize_model(vllm_config=config, model_config=model_config)
    with torch.no_grad():
        for param in model.parameters():
            param.view(-1).view(torch.uint8).fill_(0xEE)  # what no tensor gives is the same twice
    get_model_loader(load_config).load_weights(model, model_config)
    return model


def last_report() -> dict[str, Any]:
    text = Path(os.environ["FASTLOAD_REPORT"]).read_text()
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    return report


def numbered_bytes(model: torch.nn.Module) -> int:
    """How many bytes of a numbered checkpoint a model holds, each element once."""
    found = [torch.empty(0, dtype=torch.float32)]
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype == torch.float32:
            flat = tensor.detach().flatten()
            found.append(flat[(flat >= FIRST_NUMBER) & (flat < _LAST_NUMBER)])
    return len(set(torch.cat(found).tolist())) * 4


def compare(
    model: str,
    uri: str,
    layout: Layout,
    rank: int,
    engine: dict[str, Any],
    *,
    processed: bool = False,
) -> dict[str, Any]:
    """What one rank holds after the default loader and after fastload, and what it read."""
    config = engine_config(model, "auto", layout, **engine)
    with rank_of(layout, rank, config):
        loaded = load(config, processed=processed)
        expected, held_bytes = state_of(loaded), numbered_bytes(loaded)
        del loaded
    config = engine_config(uri, "fastload", layout, **engine)
    with rank_of(layout, rank, config):
        actual = state_of(load(config, processed=processed))
    return {
        "rank": rank,
        "tensors": len(expected),
        "missing": sorted(set(expected) ^ set(actual)),
        "different": sorted(n for n in expected if n in actual and expected[n] != actual[n]),
        "held_bytes": held_bytes,
        "names": sorted(expected),
        "report": last_report(),
    }


def compare_ranks(
    model: str,
    uri: str,
    ranks: list[int],
    layout: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    processed: bool = False,
) -> list[dict[str, Any]]:
    """`compare` for some ranks; ``{rank}`` in the URI is replaced."""
    with variables(environ or {}):
        return [
            compare(
                model,
                uri.format(rank=rank),
                Layout(**(layout or {})),
                rank,
                options or {},
                processed=processed,
            )
            for rank in ranks
        ]


def outcome_of(model: str, load_format: str, layout: Layout, rank: int, **engine: Any) -> str:
    """``loaded``, or the class and message of the error."""
    try:
        config = engine_config(model, load_format, layout, **engine)
        with rank_of(layout, rank, config):
            load(config, processed=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def compare_or_refuse(
    model: str, ranks: list[int], layout: dict[str, Any], options: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """`compare`; for a rank where the default loader fails what both say instead."""
    found: list[dict[str, Any]] = []
    for rank in ranks:
        try:
            found.append(compare(model, model, Layout(**layout), rank, options or {}))
        except Exception as error:
            said = outcome_of(model, "fastload", Layout(**layout), rank, **(options or {}))
            found.append({"rank": rank, "refused": str(error), "said": said})
    return found


def load_failures(
    model: str,
    layout: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    rank: int = 0,
) -> dict[str, str]:
    """What each of the two loaders says to a model that cannot be loaded."""
    return {
        load_format: outcome_of(
            model, load_format, Layout(**(layout or {})), rank, **(options or {})
        )
        for load_format in ("auto", "fastload")
    }
