"""The command ``fastload doctor``: one line for each thing that a load needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from fastload_common.cli.check import Check
from fastload_common.cli.machine_checks import (
    check_cache_directory,
    check_descriptors,
    check_engines,
    check_memory,
    check_settings,
)
from fastload_common.cli.output import print_json, show, table
from fastload_common.cli.settings import AsJson, SetOption, settings_from
from fastload_common.cli.source_checks import check_credentials, check_source
from fastload_common.config import Settings
from fastload_common.errors import FastloadError

__all__ = ["diagnose", "doctor"]

OptionalUri = Annotated[
    str | None, typer.Argument(help="A model to reach: s3://, oci:// or a directory.")
]


def doctor(uri: OptionalUri = None, assignments: SetOption = None, as_json: AsJson = False) -> None:
    """Check credentials, endpoint, one ranged read, limits, and which engines see the plugin.

    Exit code 1 if a check fails.
    """
    checks = diagnose(uri, lambda: settings_from(assignments))
    if as_json:
        print_json([check.as_dict() for check in checks])
    else:
        _print(checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def diagnose(uri: str | None, read_settings: Callable[[], Settings]) -> list[Check]:
    """Run every check, each whatever the others find."""
    checks, settings = check_settings(read_settings)
    steps: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("credentials", lambda: check_credentials(uri, settings)),
        ("source", lambda: check_source(uri, settings)),
        ("descriptors", lambda: check_descriptors(settings)),
        ("memory", lambda: check_memory(settings)),
        ("cache directory", lambda: check_cache_directory(settings)),
        ("engines", check_engines),
    ]
    for name, step in steps:
        try:
            checks.extend(step())
        except FastloadError as error:
            checks.append(Check.from_error(name, error))
        except Exception as error:  # noqa: BLE001  one broken check must not hide the others
            # Not its text: a foreign error may hold a signed URL.
            checks.append(Check(name, "fail", f"the check itself failed: {type(error).__name__}"))
    return checks


def _print(checks: list[Check]) -> None:
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    printed = table("", "check", "found")
    for check in checks:
        status = Text(check.status, style=colours[check.status])
        printed.add_row(status, check.name, check.found)
        if check.remedy:
            printed.add_row("", "", f"-> {check.remedy}")
    show(printed)
