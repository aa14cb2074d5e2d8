"""The sweep: every architecture of the engine's registry, default loader against fastload.

    python -m tests.sweep.run_sweep --help

Resumable: what the results file has is not done again. A crash of one model ends only that
model's ranks. Prints the counts at the end, and writes them to a page if asked to.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.sweep.cases import LAYOUTS, Case, all_cases, layouts_of, subset
from tests.sweep.ranks import Ranks, RanksLostError
from tests.sweep.results import Result, Results, page, summary


def sweep(cases: Iterable[Case], layouts: Iterable[str], directory: Path, results: Results) -> None:
    """Run each case in each layout that it has, world size after world size.

    A model is made at one rank, and tried there first: what the engine itself refuses is not
    tried at more.
    """
    cases, layouts = list(cases), list(layouts)
    with Ranks(1, directory) as one:
        for case in cases:
            _one(one, case, "tp1", directory, results)
    for world_size in (2, 4):
        chosen = [name for name in layouts if LAYOUTS[name].world_size == world_size]
        todo = [
            (case, layout)
            for case in cases
            for layout in layouts_of(case, results.get(case.name, "tp1"), chosen)
            if results.get(case.name, layout) is None
        ]
        if todo:
            with Ranks(world_size, directory) as ranks, Ranks(1, directory) as maker:
                for case, layout in todo:
                    _one(ranks, case, layout, directory, results, maker)


def _one(
    ranks: Ranks,
    case: Case,
    layout: str,
    directory: Path,
    results: Results,
    maker: Ranks | None = None,
) -> None:
    if results.get(case.name, layout) is not None:
        return
    result = Result(case.name, layout)
    try:
        _run(ranks, maker or ranks, case, layout, directory / "models" / case.name, result)
    except RanksLostError as error:
        result.fail("lost", str(error))
    except _UnfitError as error:
        result.fail(error.outcome, str(error))
    if case.alone:
        ranks.stop()
    results.add(result)
    print(result.line(), flush=True)


def _run(ranks: Ranks, maker: Ranks, case: Case, layout: str, model: Path, result: Result) -> None:
    if layout == "tp1" or not (model / ".made").exists():
        _make(maker, case, model)
    command = {
        "directory": str(model),
        "layout": LAYOUTS[layout].arguments,
        **case.command(),
    }
    result.take_default(_all(ranks.ask({"op": "default", **command}), "refused"))
    result.take_fastload(_all(ranks.ask({"op": "fastload", **command}), "failed"))


def _make(maker: Ranks, case: Case, model: Path) -> None:
    """Make a checkpoint that the engine loads: by transformers, or under the engine's names.

    Raises:
        _UnfitError: the engine loads neither; with what it said to the first.
    """
    first: _UnfitError | None = None
    for by in ("transformers", "engine"):
        shutil.rmtree(model, ignore_errors=True)
        made = {"op": "make", "case": case.document() | {"by": by}, "directory": str(model)}
        loaded = {
            "op": "default",
            "directory": str(model),
            "layout": LAYOUTS["tp1"].arguments,
            **case.command(),
        }
        try:
            _all(maker.ask(made), "unmade")
            _all(maker.ask(loaded), "refused")
            (model / ".made").touch()
            return
        except _UnfitError as error:
            first = first or error
    assert first is not None
    raise first


class _UnfitError(Exception):
    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


def _all(answers: list[dict[str, Any]], outcome: str) -> list[dict[str, Any]]:
    for answer in answers:
        if not answer["ok"]:
            raise _UnfitError(outcome, answer["error"])
    return answers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only cases whose name begins so (default: all)")
    parser.add_argument("--subset", action="store_true", help="what every test run does")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: %(default)s")
    parser.add_argument("--directory", type=Path, help="for models, logs and results; kept")
    parser.add_argument("--page", type=Path, help="write the results to this Markdown file")
    parser.add_argument("--again", action="store_true", help="what failed before is done again")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> Iterator[Case]:
    names = options.names
    for case in subset() if options.subset else all_cases():
        if not names or any(case.name.startswith(name) for name in names):
            yield case


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="fastload-sweep-") as temporary:
        directory: Path = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        results = Results(directory / "results.jsonl", again=options.again)
        cases = list(chosen(options))
        sweep(cases, ["tp1", *options.layouts.split(",")], directory, results)
        text, bad = summary(results, cases)
        print(text)
        if options.page:
            options.page.write_text(page(results, cases), encoding="utf-8")
        return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
