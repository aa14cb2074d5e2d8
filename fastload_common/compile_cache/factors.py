"""What decides a compiled artefact, by name: the documented, closed list that a key is made of.

What is not in `FACTORS` cannot enter a key, so host names, addresses, ports, directories, plugin
lists and buckets stay out by construction. Where a factor is an open table (the engine's own
settings), a path, a URL or a variable that is known to differ from pod to pod is refused.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastload_common.config_values import ENV_PREFIX
from fastload_common.errors import FactorsInvalidError

__all__ = ["FACTORS", "Factor", "Factors", "check_factors", "pick_variables"]

Factors = dict[str, Any]
"""Name -> plain JSON value; made by `check_factors`."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing that decides the artefact.

    Attributes:
        name: ``group.what``.
        meaning: what to give, and why another value means another artefact.
        required: a key without it cannot be trusted.
        by_machine: `fastload_common.compile_cache.machine` finds it.
    """

    name: str
    meaning: str
    required: bool = False
    by_machine: bool = False


def _f(name: str, meaning: str, *flags: str) -> Factor:
    return Factor(name, meaning, required="required" in flags, by_machine="machine" in flags)


FACTORS: tuple[Factor, ...] = (
    _f("engine.name", "The engine.", "required"),
    _f("engine.version", "Its version, local part included.", "required"),
    _f("engine.source", "Digest of its files that are traced: a local edit is another model."),
    _f("engine.factors", "Table: what the engine itself hashes, without paths and addresses."),
    _f("engine.variables", "Table: those of its variables that change what is compiled."),
    _f("engine.extensions", "Table: name and version of what adds models or operators to it."),
    _f("model.content", "Table: file and digest, as `model_content` makes it.", "required"),
    _f("model.overrides", "Table: overrides of the model's configuration."),
    _f("model.quantization", "The method that is in force."),
    _f("model.task", "Generation, pooling, ...: another head, another graph."),
    _f("model.weights", "Digest of the weights; only where values are compiled in (freezing)."),
    _f("dtype.model", "Of the parameters and activations."),
    _f("dtype.kv_cache", "Of the KV cache."),
    _f("limits.max_model_len", "Longest sequence."),
    _f("limits.max_num_batched_tokens", "Largest batch in tokens: a bound of shapes."),
    _f("limits.max_num_seqs", "Most sequences in a batch."),
    _f("limits.block_size", "Tokens in a block of the KV cache."),
    _f("layout.tensor", "Tensor-parallel size."),
    _f("layout.pipeline", "Pipeline-parallel size."),
    _f("layout.pipeline_partition", "Layers of each stage, where they are set."),
    _f("layout.expert", "Expert-parallel size, or whether it is on."),
    _f("layout.expert_placement", "Which experts stand where, redundant ones included."),
    _f("layout.data", "Data-parallel size."),
    _f("layout.context", "Context-parallel sizes."),
    _f("layout.sequence", "Whether sequence parallelism is on."),
    _f("layout.ranks", "The ranks whose artefacts are in the bundle: those of one node."),
    _f("layout.devices", "Device number of each of them: generated code names its device."),
    _f("speculative.method", "How drafts are made."),
    _f("speculative.tokens", "Tokens of a draft: a bound of shapes."),
    _f("speculative.model", "Table: content of the draft model, as model.content."),
    _f("speculative.settings", "Table: the rest of its settings."),
    _f("lora.enabled", "Whether layers are wrapped."),
    _f("lora.max_loras", "Most adapters in a batch."),
    _f("lora.max_rank", "Largest rank: a shape."),
    _f("lora.dtype", "Of the adapters."),
    _f("lora.targets", "Which layers are wrapped."),
    _f("lora.settings", "Table: the rest of its settings."),
    _f("multimodal.limits", "Table: most items and sizes of each kind."),
    _f("multimodal.processor", "Table: settings of the processor that change shapes."),
    _f("multimodal.settings", "Table: the rest of its settings."),
    _f("attention.backend", "Its kernels are called from the compiled graph."),
    _f("compilation.settings", "Table: mode, passes, split points, custom operators."),
    _f("compilation.graph_mode", "Which graphs are captured."),
    _f("compilation.graph_sizes", "Batch sizes that are captured or compiled for."),
    _f("compilation.inductor", "Table: settings of Inductor that are not its defaults."),
    _f("compilation.deterministic", "Whether only deterministic kernels are chosen."),
    _f("software.torch", "Version of torch, local part included.", "required", "machine"),
    _f("software.torch_build", "Commit that torch was built from.", "machine"),
    _f("software.cuda", "CUDA that torch was built with.", "machine"),
    _f("software.hip", "ROCm that torch was built with.", "machine"),
    _f("software.triton", "Version of Triton: it brings its own assembler.", "machine"),
    _f("software.packages", "Table: versions of other packages that compile.", "machine"),
    _f("software.python", "Implementation, version and ABI of Python.", "required", "machine"),
    _f("software.libc", "Name and version of the C library.", "required", "machine"),
    _f("hardware.kind", "cpu, cuda, rocm, ...", "required", "machine"),
    _f("hardware.gpus", "Names of the node's GPUs, each once.", "machine"),
    _f("hardware.gpu_architectures", "Their compute capabilities, each once.", "machine"),
    _f("hardware.gpu_driver", "Version of their driver.", "machine"),
    _f("hardware.machine", "x86_64, aarch64, ...", "required", "machine"),
    _f(
        "hardware.cpu_isa",
        "Instruction sets that a compiler may use here. On a GPU node too: code for the host is "
        "compiled for the very CPU that compiles it.",
        "machine",
    ),
)
"""Every factor, by group."""

_BY_NAME = {factor.name: factor for factor in FACTORS}
_MAX_DEPTH = 32
_TABLES_OF_VARIABLES = ("engine.variables",)

# Parts of a variable's name, between underscores, that say: differs from pod to pod.
_NOISY_NAMES = (
    "HOST HOSTNAME IP ADDR ADDRESS PORT HOME DIR DIRECTORY ROOT PATH CACHE TMPDIR URL ENDPOINT "
    "BUCKET KEY TOKEN SECRET PASSWORD PLUGINS LOG LOGGING LOGLEVEL UUID PID BUNDLE INDICES POD "
    "NAMESPACE SOCKET"
)
_NOISY_PARTS = frozenset(_NOISY_NAMES.split())
_PLACE = re.compile(r"\s*(/|~(/|$)|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]*://)")


def check_factors(given: Mapping[str, Any]) -> Factors:
    """The factors as plain JSON values, sorted; those that are None are left out.

    Raises:
        FactorsInvalidError: an unknown name, a missing one, a value that JSON does not have, or
            one that would differ from pod to pod.
    """
    for name in given:
        if name not in _BY_NAME:
            near = difflib.get_close_matches(str(name), _BY_NAME, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise FactorsInvalidError(
                f"unknown factor {name!r}", hint=f"{hint}docs/compile-cache-key.md lists all"
            )
    checked = {
        name: _plain(given[name], name, 0) for name in sorted(given) if given[name] is not None
    }
    missing = [f.name for f in FACTORS if f.required and f.name not in checked]
    if missing:
        raise FactorsInvalidError(
            f"without {', '.join(missing)} a key could lead to what was compiled for another case",
            hint="give them, or keep the compile cache off",
        )
    for name in _TABLES_OF_VARIABLES:
        for variable in checked.get(name, {}):
            _check_variable(variable)
    return checked


def pick_variables(environ: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Those of the named variables that are set, for ``engine.variables``.

    Raises:
        FactorsInvalidError: one of the names is known to differ from pod to pod.
    """
    for name in names:
        _check_variable(name)
    return {name: environ[name] for name in sorted(names) if environ.get(name, "") != ""}


def _check_variable(name: str) -> None:
    if name.startswith(ENV_PREFIX):
        raise FactorsInvalidError(f"{name} is a setting of fastload: it changes no artefact")
    noisy = _NOISY_PARTS.intersection(name.upper().split("_"))
    if noisy:
        raise FactorsInvalidError(
            f"the variable {name} may not be part of a key: "
            f"{', '.join(sorted(noisy))} in its name says that it differs from pod to pod"
        )


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise FactorsInvalidError(f"{where}: nested too deeply")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        _check_text(value, where)
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise FactorsInvalidError(f"{where}: {value} is no JSON number")
        return value
    if isinstance(value, Mapping):
        return dict(_members(value, where, depth))
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        items = [_plain(item, where, depth + 1) for item in value]
        return sorted(items, key=lambda item: (type(item).__name__, str(item)))
    # Its repr may hold an address in memory, so that no key would ever come twice.
    raise FactorsInvalidError(f"{where}: {type(value).__name__} is no JSON value")


def _members(value: Mapping[Any, Any], where: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key in sorted(value, key=str):
        if not isinstance(key, str):
            raise FactorsInvalidError(f"{where}: the key {key!r} is no text")
        _check_text(key, where)
        yield key, _plain(value[key], f"{where}.{key}", depth + 1)


def _check_text(text: str, where: str) -> None:
    if _PLACE.match(text):
        raise FactorsInvalidError(
            f"{where}: a path or URL may not be part of a key: the same content elsewhere would "
            "never be found",
            hint="give the digest of what is there",
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FactorsInvalidError(f"{where}: a text with lone surrogates") from None
