"""Random checkpoints of one architecture each, by transformers' own classes.

What `save_pretrained` writes has the names and shapes of published checkpoints, configuration
and index included. Needs torch and transformers, which come with the engine; never imported by
what is shipped to run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastload_common.testing.sweep_families import special
from fastload_common.testing.sweep_shrink import merged, shrunk

__all__ = ["has_class", "tiny_config", "write_by_transformers"]

MAX_SHARD_BYTES = 192 * 1024
"""Small, so that a model has several shards and a fused tensor's parts lie in different ones."""


def has_class(architecture: str) -> bool:
    """Tell whether transformers can build this architecture."""
    import transformers

    return hasattr(transformers, special(architecture).get("class", architecture))


def tiny_config(architecture: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Make transformers' configuration of an architecture, shrunk.

    Args:
        architecture: the name in ``architectures`` of a ``config.json``.
        changes: laid over the small configuration, level by level.
    """
    import transformers

    known = special(architecture)
    model_class = getattr(transformers, known.get("class", architecture))
    config_class = model_class.config_class
    # Some defaults are no valid configuration, even to themselves: those are changed first.
    full = config_class(**known.get("before", {})).to_dict()
    small = merged(merged(shrunk(full), known.get("config", {})), changes or {})
    config = config_class(**small)
    config.architectures = [architecture]
    return config


def write_by_transformers(
    directory: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write ``config.json`` and shards of a random model.

    Args:
        directory: created if absent.
        architecture: a class of transformers; see `has_class`.
        seed: of the weights.
        dtype: torch's name of the weights' type.
        changes: see `tiny_config`.
    """
    import torch
    import transformers

    name = special(architecture).get("class", architecture)
    config = tiny_config(architecture, changes)
    with _seeded(seed):
        model = getattr(transformers, name)(config)
        _randomise(model)
    model = model.to(getattr(torch, dtype))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=MAX_SHARD_BYTES)
    _name_architecture(directory / "config.json", architecture)


def _name_architecture(path: Path, architecture: str) -> None:
    """Name the architecture as the engine's registry has it."""
    document = json.loads(path.read_text()) | {"architectures": [architecture]}
    path.write_text(json.dumps(document, indent=1))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _randomise(model: Any) -> None:
    """Give every parameter values of its own: equal ones hide swapped or missed slices."""
    import torch

    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape) * 0.1 + 0.01)
