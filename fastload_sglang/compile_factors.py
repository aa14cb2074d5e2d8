"""What decides the artefacts of a start of SGLang: its decided arguments, as factors of a key.

Read once, in the process that starts the others, when no argument changes any more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastload_common.compile_cache.content import model_content, model_content_of
from fastload_common.compile_cache.factors import pick_variables
from fastload_common.compile_cache.key import canonical
from fastload_common.compile_cache.machine import machine_factors
from fastload_common.config import environment
from fastload_common.engine.compile_values import is_place, plain
from fastload_common.errors import FactorsInvalidError
from fastload_sglang import compat
from fastload_sglang import compile_arguments as facts
from fastload_sglang.caches import ROOTS
from fastload_sglang.compile_ranks import Ranks

__all__ = ["factors_of", "variables"]

_ADAPTER = "adapter_config.json"
_REST = "engine.factors"
_PLACES = frozenset(variable for root in ROOTS for variable in root.variables)


def factors_of(server_args: Any, ranks: Ranks) -> dict[str, Any]:
    """Factors for `check_factors`.

    Args:
        server_args: decided.
        ranks: of this node.

    Raises:
        EngineUnsupportedError: this SGLang has other arguments.
        FactorsInvalidError: the model has no configuration.
        OSError: it cannot be read.
    """
    view = compat.RESOLVING.get()(server_args)
    device = str(view.device).partition(":")[0]
    found = machine_factors(kind="cpu" if device == "cpu" else None)
    found |= _arguments(view, compat.ARGUMENTS.get()(type(server_args)))
    found |= {
        "engine.name": compat.ENGINE.package,
        "engine.version": compat.ENGINE.version(),
        "engine.variables": variables(environment()),
        "model.content": _content(server_args, view),
        "model.overrides": _overrides(view.json_model_override_args),
        "layout.ranks": ranks.names,
        "layout.devices": ranks.devices,
    }
    if view.speculative_draft_model_path is not None:
        found["speculative.model"] = _content_at(str(view.speculative_draft_model_path))
    if view.lora_paths:
        found["lora.settings"]["adapters"] = sorted(map(_adapter, _paths(view.lora_paths)))
    if device == "cpu":
        found[_REST]["threads"] = ranks.threads
    return found


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the environment that may change what is compiled."""
    names = []
    for name in filter(_may_matter, environ):
        try:
            pick_variables(environ, [name])
        except FactorsInvalidError:
            continue  # its name says that it differs from pod to pod
        names.append(name)
    return {name: str(_value(value)) for name, value in pick_variables(environ, names).items()}


def _may_matter(name: str) -> bool:
    if name in _PLACES or name.startswith(facts.IGNORED_VARIABLES):
        return False
    stems = tuple(stem for stem in facts.VARIABLES if stem.endswith("_"))
    return name in facts.VARIABLES or name.startswith(stems)


def _arguments(view: Any, namespaces: Mapping[str, str]) -> dict[str, Any]:
    """Each argument under its factor."""
    compiles_model = bool(view.enable_torch_compile)
    found: dict[str, Any] = {name: {} for name in (_REST, *facts.TABLES.values())}
    for name, namespace in namespaces.items():
        if not _counts(name, namespace, compiles_model=compiles_model):
            continue
        given = getattr(view, name)
        value = _file(given) if name in facts.CONTENT else _value(given)
        if name in facts.NAMED:
            found[facts.NAMED[name]] = value
        elif namespace in facts.TABLES:
            found[facts.TABLES[namespace]][name] = value
        else:
            found[_REST].setdefault(namespace, {})[name] = value
    return found


def _counts(name: str, namespace: str, *, compiles_model: bool) -> bool:
    if name in facts.IGNORED or (name in facts.POOL_SIZES and not compiles_model):
        return False
    return name in facts.KEPT or namespace not in facts.IGNORED_NAMESPACES


def _content(server_args: Any, view: Any) -> dict[str, str]:
    """Of the model. SGLang has read its configuration by now, wherever it was."""
    path = str(view.model_path)
    if compat.IS_OBJECT_URI.get()(path):
        path = str(compat.METADATA_PATH.get()(path))
    if os.path.isdir(path):
        return model_content_of(Path(path))
    model_config = compat.MODEL_CONFIG.get()(server_args)
    if os.path.isdir(str(model_config.model_path)):
        return model_content_of(Path(model_config.model_path))
    configuration = json.loads(model_config.hf_config.to_json_string(use_diff=False))
    return model_content({"config.json": canonical(configuration)})


def _content_at(path: str) -> dict[str, str]:
    """Of a draft model; one whose files are not here counts by its name."""
    if compat.IS_OBJECT_URI.get()(path):
        path = str(compat.METADATA_PATH.get()(path))
    try:
        return model_content_of(Path(path))
    except (OSError, FactorsInvalidError):
        return {"name": _digest(path.encode())}


def _overrides(text: Any) -> Any:
    """As a table, whatever the order in which it was written."""
    overrides = json.loads(text) if isinstance(text, str) and text.strip() else text
    return plain(overrides) or None


def _file(value: Any) -> Any:
    """What a file says; anything else as it is."""
    if isinstance(value, str) and os.path.isfile(value):
        return _digest(Path(value).read_bytes())
    return _value(value)


def _value(value: Any) -> Any:
    """A place that nobody has listed is seen to differ where it does, rather than overlooked."""
    return _digest(value.encode()) if is_place(value) else plain(value)


def _paths(adapters: Any) -> Iterator[str]:
    for adapter in adapters.values() if isinstance(adapters, Mapping) else adapters:
        yield str(getattr(adapter, "lora_path", adapter))


def _adapter(path: str) -> str:
    """Its configuration decides shapes and layers, where the arguments do not."""
    try:
        return _digest(canonical(json.loads((Path(path) / _ADAPTER).read_bytes())))
    except (OSError, ValueError):
        return _digest(path.encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
