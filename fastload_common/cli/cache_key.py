"""The command ``fastload cache key``: the key an engine would use here, and all its factors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fastload_common.cli.adapters import load_part
from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson
from fastload_common.errors import ConfigError

if TYPE_CHECKING:
    from fastload_common.engine.key_maker import KeyMaker

__all__ = ["key", "read_factors"]

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [-- ARGUMENT...]",
        help="The engine's own command line, the model first; its options after --.",
    ),
]
FactorsOption = Annotated[
    str | None,
    typer.Option("--factors", metavar="FILE", help="Instead: the engine's factors, JSON; or -."),
]


def key(
    arguments: Arguments = None,
    engine: Annotated[str, typer.Option(help="Whose command line it is.")] = "vllm",
    factors: FactorsOption = None,
    as_json: AsJson = False,
) -> None:
    """Print the key that an engine with this command line would use here, and all its factors.

    Run it in the engine's image, on a node of the kind: the machine is part of the key. Without a
    command line and without --factors: what the machine alone gives.
    """
    from fastload_common.compile_cache.factors import check_factors
    from fastload_common.compile_cache.key import key_of
    from fastload_common.compile_cache.machine import machine_factors

    if arguments and factors is not None:
        raise ConfigError("both a command line and --factors", hint="give one of them")
    made = None
    if arguments:
        found = check_factors(_ask_engine(engine, arguments))
        made = key_of(found)
    elif factors is not None:
        found = check_factors({**machine_factors(), **read_factors(factors)})
        made = key_of(found)
    else:
        found = machine_factors()
    if as_json:
        print_json({"key": made, "factors": found})
        return
    rows = table("factor", "value")
    for name, value in _flat("", found):
        rows.add_row(name, value)
    show(f"key {made}" if made else "no key without an engine's command line, or --factors", rows)


def read_factors(file: str) -> dict[str, Any]:
    """Factors from a file or standard input (``-``), bare or as `key` prints them.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    if isinstance(found, dict) and isinstance(found.get("factors"), dict):
        found = found["factors"]
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected an object of factors")
    return found


def _ask_engine(engine: str, arguments: Sequence[str]) -> Mapping[str, Any]:
    maker = _key_maker(engine)
    maker.check()
    with _engine_prints_elsewhere():
        return maker.factors(arguments)


def _key_maker(engine: str) -> KeyMaker:
    from fastload_common.engine.key_maker import GROUP

    instead = "name another --engine, or give --factors"
    return cast("KeyMaker", load_part(GROUP, engine, "adapter", instead))


@contextlib.contextmanager
def _engine_prints_elsewhere() -> Iterator[None]:
    """Send to standard error what an engine prints: standard output is for the key."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each row of a table by itself, so that a line can be found and compared."""
    if isinstance(value, Mapping) and value:
        for inner in sorted(value):
            yield from _flat(f"{name}.{inner}" if name else str(inner), value[inner])
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
