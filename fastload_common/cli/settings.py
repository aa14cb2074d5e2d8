"""The command ``fastload config``, and the option ``--set`` of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fastload_common.cli.output import print_json, show, table
from fastload_common.config import OPTIONS, Option, Settings, environment, load_settings
from fastload_common.errors import ConfigError
from fastload_common.units import format_size

__all__ = ["AsJson", "SetOption", "Uri", "config", "parse_assignments", "settings_from"]

Uri = Annotated[
    str,
    typer.Argument(
        help="s3://bucket/prefix, oci://registry/repository:tag, file:///directory, or a path."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as concurrency=64."),
]


def settings_from(assignments: Sequence[str] | None) -> Settings:
    """The settings of the environment, with those of ``--set`` on top.

    Raises:
        ConfigError: not ``NAME=VALUE``, or refused by the registry.
    """
    return load_settings(parse_assignments(assignments), extra_name="--set")


def config(assignments: SetOption = None, as_json: AsJson = False) -> None:
    """Print every setting: its value, where it comes from, what it means."""
    given = parse_assignments(assignments)
    settings = load_settings(given, extra_name="--set")
    rows = [(option, getattr(settings, option.name), _origin(option, given)) for option in OPTIONS]
    if as_json:
        print_json(
            {
                option.name: {"value": _plain(value), "origin": origin, "unit": option.unit}
                for option, value, origin in rows
            }
        )
        return
    printed = table("setting", "value", "origin", "meaning")
    for option, value, origin in rows:
        printed.add_row(option.name, _shown(option, value), origin, option.meaning)
    show(printed)


def parse_assignments(assignments: Sequence[str] | None) -> dict[str, str]:
    """What was given with ``--set``, not looked at yet.

    Raises:
        ConfigError: not ``NAME=VALUE``.
    """
    given: dict[str, str] = {}
    for assignment in assignments or ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(
                f"expected NAME=VALUE after --set, got {assignment!r}",
                hint="write e.g. --set concurrency=64",
            )
        given[name.strip()] = value
    return given


def _origin(option: Option, given: dict[str, str]) -> str:
    if option.name in given:
        return "--set"
    return option.variable if environment().get(option.variable, "").strip() else "default"


def _shown(option: Option, value: Any) -> str:
    if value is None:
        return "not set"
    if option.unit in ("bytes", "bytes/s"):
        return format_size(value) + option.unit.removeprefix("bytes")
    if option.unit == "s":
        return f"{value:g} s"
    if option.unit == "flag":
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)
