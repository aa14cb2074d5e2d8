"""Computes the compile keys of many vLLM configurations in one process. Not a test itself.

    python -m tests.vllm.key_worker JOB.json

prints one JSON object on its last line: name -> whether our key and the engine's differ from
those of the case's base, and in what.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.vllm.key_cases import BASES, CASES, SHARED, Case


def filled(value: Any, places: Mapping[str, str]) -> Any:
    """A value with the places of models put in."""
    if isinstance(value, str):
        return value.format_map(places) if value.startswith("{") else value
    if isinstance(value, Mapping):
        return {name: filled(item, places) for name, item in value.items()}
    return value


def keys(case: Case, places: Mapping[str, str]) -> tuple[dict[str, Any], str, bool]:
    """Our factors, the engine's key, and whether both stay where the configuration is sent."""
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.engine.arg_utils import EngineArgs

    from fastload_common.compile_cache.factors import check_factors
    from fastload_vllm.compile_factors import factors_of

    variables = filled(case.variables, places)
    with environment(variables), machine(case.machine, gpu=case.base == "gpu"):
        arguments = SHARED | BASES[case.base] | dict(case.arguments)
        config = EngineArgs(**filled(arguments, places)).create_engine_config()
        for path, value in case.fields.items():
            *parts, last = path.split(".")
            owner = config
            for part in parts:
                owner = getattr(owner, part)
            kind = type(getattr(owner, last))
            setattr(owner, last, kind[value] if hasattr(kind, "__members__") else value)
        sent = pickle.loads(pickle.dumps(config))
        factors = check_factors(factors_of(config))
        # Behind the first two come torch's own, the same for all.
        own, sent_own = (str(aot_compile_hash_factors(each)[:2]) for each in (config, sent))
        return factors, own, (check_factors(factors_of(sent)), sent_own) == (factors, own)


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """With these; the engine sets some itself, and nothing of that may stay either."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def machine(answers: Mapping[str, Any], *, gpu: bool) -> Iterator[None]:
    """Another machine, or another engine on it."""
    from fastload_common.compile_cache.machine import ThisMachine, TorchBuild
    from fastload_common.compile_cache.nvml import Gpu
    from fastload_common.engine import compile_source
    from fastload_vllm import compat, compile_factors

    told: dict[str, Any] = dict(answers)
    if gpu:
        told = {"gpus": [("NVIDIA H100", "sm_90")], "gpu_driver": "570.1"} | told
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        if gpu:
            platform = SimpleNamespace(device_type="cuda", is_rocm=lambda: False)
            put(compat, "CURRENT_PLATFORM", SimpleNamespace(get=lambda: platform))
        for name, value in told.items():
            match name:
                case "version":
                    real = ThisMachine.version
                    put(
                        ThisMachine, name, lambda s, n, r=real, v=value: dict([v]).get(n) or r(s, n)
                    )
                case "gpus":
                    put(ThisMachine, name, lambda s, v=value: [Gpu(*each) for each in v])
                case "torch_build":
                    put(ThisMachine, name, lambda s, v=value: TorchBuild(*v))
                case "engine_version":
                    put(compat, name, lambda v=value: v)
                case "engine_file":
                    put(compile_source, "_file_of", edited(compile_source._file_of, value))
                case "extension":
                    put(compile_factors, "extensions_of", lambda *_, v=value: dict([v]))
                case _:
                    put(ThisMachine, name, lambda s, *_, v=value: v)
        yield


def edited(original: Callable[..., Any], module: str) -> Callable[..., Any]:
    """Finds the engine's files, but of one module another one."""

    def find(name: str, *args: Any) -> Any:
        return Path(__file__) if name.endswith(f".{module}") else original(name, *args)

    return find


def changed(case: Case, source: Path, directory: Path) -> str:
    """A copy of a model's directory with the case's files."""
    directory.mkdir(parents=True)
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    for name, content in case.files.items():
        file = directory / name
        if not isinstance(content, str):
            there = json.loads(file.read_text()) if file.exists() else {}
            content = json.dumps(there | dict(content))
        file.write_text(content)
    return str(directory)


def table(places: dict[str, str], scratch: Path) -> dict[str, Any]:
    """All cases; each against its base."""
    from fastload_common.compile_cache.key import diff

    bases = {name: keys(Case(name, name), places) for name in BASES}
    found: dict[str, Any] = {
        name: {"factors": factors, "own": own, "sent": sent}
        for name, (factors, own, sent) in bases.items()
    }
    for name, case in CASES.items():
        here = dict(places)
        if case.files:
            directory = scratch / f"variant-{len(found)}"
            here["dense"] = changed(case, Path(places["dense"]), directory)
        factors, own, sent = keys(case, here)
        base, base_own, _ = bases[case.base]
        found[name] = {"differing": diff(factors, base), "own": own != base_own, "sent": sent}
    return found


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    result = table(job["places"], Path(job["scratch"]))
    print(json.dumps(result), flush=True)
    # vLLM's helper threads must not hold this process.
    os._exit(0)
