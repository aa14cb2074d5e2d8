"""The command ``fastload``: joins the commands and turns errors into one clear message.

Exit codes: 0 done; 1 a check of ``doctor`` failed; 2 an error of ours or a wrong command line.
Commands import what they need inside their functions, so that ``--help`` is quick.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from fastload_common import __version__
from fastload_common.cli.advise import advise
from fastload_common.cli.bench import bench
from fastload_common.cli.cache import app as cache
from fastload_common.cli.doctor import doctor
from fastload_common.cli.inspect import inspect
from fastload_common.cli.node_cache import app as node_cache
from fastload_common.cli.plan import plan
from fastload_common.cli.pull import pull
from fastload_common.cli.settings import config
from fastload_common.errors import FastloadError

__all__ = ["app", "main", "run"]

app = typer.Typer(
    name="fastload",
    help="Fast, exact model loading from object storage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(inspect)
app.command()(plan)
app.command()(pull)
app.command()(bench)
app.command()(advise)
app.command()(doctor)
app.command()(config)
app.add_typer(cache, name="cache")
app.add_typer(node_cache, name="node-cache")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fastload {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Log to standard error; show tracebacks of errors.")
    ] = False,
) -> None:
    """Options of the program itself; `main` acts on ``--debug``."""


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name. ``--debug`` may stand anywhere
            in front of a ``--``.

    Returns:
        The exit code.
    """
    if sys.stdout is None:
        print("fastload: standard output is closed: there is nowhere to print to", file=sys.stderr)
        return 2
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    rest = [word for word in arguments[:end] if word != "--debug"] + list(arguments[end:])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logger = logging.getLogger("fastload_common")
    level_before = logger.level
    if debug:
        logger.setLevel(logging.DEBUG)
    try:
        app(args=rest, prog_name="fastload")
    except SystemExit as end_of_command:
        code = end_of_command.code
        return code if isinstance(code, int) else int(code is not None)
    except FastloadError as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"fastload: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        logger.setLevel(level_before)
    return 0


def run() -> None:
    """Entry point of the program."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
