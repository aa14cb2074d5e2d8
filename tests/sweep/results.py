"""What came out of a sweep: kept line by line, counted, and written as a page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.sweep.cases import Case


@dataclass
class Result:
    """One model in one layout.

    Outcomes: ``same``, ``different``; ``failed`` (the default loader loads it, fastload does
    not); ``refused`` (the engine itself does not load it here), ``unmade`` (no checkpoint could
    be made), ``lost`` (a rank crashed or hung).
    """

    case: str
    layout: str
    outcome: str = "same"
    reason: str = ""
    tensors: int = 0  # compared, over all ranks
    different: int = 0
    untouched: int = 0  # of those compared, never written by either loader
    moe: bool = False
    pipeline: bool = False
    unprocessed: str = ""  # why the engine could not post-process here
    stand_ins: str = ""  # choices of kernels in which the engine found none
    eager: str = ""
    needed: list[float] = field(default_factory=list)  # share of the model's bytes, rank by rank
    per_own: float = 0.0  # the most bytes that a rank needed, for each of its parameters' bytes

    def fail(self, outcome: str, reason: str) -> None:
        self.outcome, self.reason = outcome, " ".join(reason.split())[:240]

    def take_default(self, answers: list[dict[str, Any]]) -> None:
        self.tensors = sum(answer["tensors"] for answer in answers)
        self.untouched = sum(answer["untouched_count"] for answer in answers)
        self._own_bytes = [answer["own_bytes"] for answer in answers]
        self.moe, self.pipeline = answers[0]["moe"], answers[0]["pipeline"]
        self.stand_ins = ", ".join(answers[0]["stand_ins"])
        self.unprocessed = answers[0]["refused"] or ""

    def take_fastload(self, answers: list[dict[str, Any]]) -> None:
        self.different = sum(answer["different_count"] for answer in answers)
        reports = [answer["report"] for answer in answers]
        self.per_own = round(
            max(
                report["needed_bytes"] / max(1, own)
                for report, own in zip(reports, self._own_bytes, strict=True)
            ),
            3,
        )
        self.eager = reports[0]["eager_reason"] or ""
        self.needed = [
            round(report["needed_bytes"] / max(1, report["model_bytes"]), 4) for report in reports
        ]
        if self.different:
            names = next(answer["different"] for answer in answers if answer["different"])
            self.fail("different", ", ".join(names[:4]))

    def line(self) -> str:
        words = [f"{self.outcome:9}", f"{self.layout:7}", self.case]
        if self.tensors:
            words.append(f"{self.tensors} tensors")
        if self.untouched:
            words.append(f"({self.untouched} untouched)")
        if self.needed:
            shares = " ".join(f"{share:.2f}" for share in self.needed)
            words.append(f"needed {shares} ({self.per_own:.2f} of its own)")
        words += [
            text for text in (self.reason, self.unprocessed, self.stand_ins, self.eager) if text
        ]
        return "  ".join(words)


class Results:
    """The results so far, in a file of JSON lines.

    Args:
        path: read if it is there, and added to.
        again: forget what was not the same.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self._path = path
        self._all: dict[tuple[str, str], Result] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                result = Result(**json.loads(line))
                self._all[result.case, result.layout] = result
        if again:
            self._all = {k: r for k, r in self._all.items() if r.outcome == "same"}

    def get(self, case: str, layout: str) -> Result | None:
        return self._all.get((case, layout))

    def add(self, result: Result) -> None:
        self._all[result.case, result.layout] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def of(self, cases: Iterable[Case]) -> list[Result]:
        names = {case.name for case in cases}
        return [result for result in self._all.values() if result.case in names]


def summary(results: Results, cases: list[Case]) -> tuple[str, int]:
    """The counts, and how many results are bad: different, failed, lost."""
    found = results.of(cases)
    same = {result.case for result in found if result.outcome == "same"}
    lines = []
    for kind, title in _TITLES.items():
        names = {case.name for case in cases if case.kind == kind}
        if names:
            lines.append(f"{title}: {len(same & names)} of {len(names)} load, with equal tensors")
    formats = {case.quantization for case in cases if case.name in same and case.quantization}
    lines.append(f"Formats of quantized weights: {len(formats)}")
    layouts = Counter(result.layout for result in found if result.outcome == "same")
    lines.append("Loads by layout: " + ", ".join(f"{name} {n}" for name, n in layouts.items()))
    lines.append(f"Tensors compared: {sum(result.tensors for result in found)}")
    lines.append(f"Tensors that differ: {sum(result.different for result in found)}")
    bad = [result for result in found if result.outcome in ("different", "failed", "lost")]
    lines += [result.line() for result in bad]
    return "\n".join(lines), len(bad)


def page(results: Results, cases: list[Case]) -> str:
    """The results as a Markdown page."""
    found = {(result.case, result.layout): result for result in results.of(cases)}
    layouts = list(dict.fromkeys(layout for _, layout in found))
    text, _ = summary(results, cases)
    lines = [_INTRODUCTION, *(f"- {line}" for line in text.splitlines()), ""]
    for kind, title in _TITLES.items():
        own = [case for case in cases if case.kind == kind]
        rows = [_row(case, layouts, found) for case in own if _loaded(case, layouts, found)]
        if rows:
            lines += [f"## {title}", "", _head(layouts), *rows, ""]
    lines += ["## Not loaded, and why", "", "| name | reason |", "|---|---|"]
    lines += [_reason(case, layouts, found) for case in cases if not _loaded(case, layouts, found)]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """# Sweep over the engine's architectures

Written by `make sweep`; do not edit. Small random checkpoints, one an architecture of vLLM's
registry, each loaded by the engine's default loader and by fastload in as many processes as the
layout has ranks. Every parameter, buffer and tensor attribute is compared bit for bit, right after
`load_weights` and again after the engine's post-processing where this machine can do it.

- Names and shapes are those that transformers saves; where it has no such class, or other names
  than published checkpoints, those that the engine's own `load_weights` asks for.
- The sizes are awkward on purpose: a vocabulary of 509, two key/value heads for four ranks,
  parts of an odd number of blocks.
- Where the engine has no kernel for this machine, one that computes nothing stands in, so that
  the layer is made and loaded; the notes name the choice.
- Layouts: `tp`, `pp` and `ep` with the number of ranks; `eplb2` with redundant experts; `dp2` with
  data-parallel attention, `dp2ep` with its experts divided. Fewer cases have those last three.
- In the tables: tensors compared over all ranks; `-` where the model has no such layout.

`make sweep` goes on where it stopped; `make sweep SWEEP_ARGS="Qwen --layouts tp2"` runs a part.
Every test run does a small part of it.

"""

_TITLES = {
    "architecture": "Architectures",
    "draft": "Draft models",
    "quantized": "Quantized checkpoints",
    "layout": "Other layouts",
}

Found = dict[tuple[str, str], Result]


def _loaded(case: Case, layouts: list[str], found: Found) -> bool:
    return any(
        (result := found.get((case.name, layout))) is not None and result.outcome == "same"
        for layout in layouts
    )


def _head(layouts: list[str]) -> str:
    return "| name | " + " | ".join(layouts) + " | notes |\n|---|" + "---:|" * len(layouts) + "---|"


def _row(case: Case, layouts: list[str], found: Found) -> str:
    cells, notes = [], []
    for layout in layouts:
        result = found.get((case.name, layout))
        if result is None:
            cells.append("-")
        elif result.outcome == "same":
            cells.append(str(result.tensors))
            notes += [result.eager and f"read eagerly: {result.eager}"]
            notes += [result.stand_ins and f"without kernels for: {result.stand_ins}"]
            notes += [result.unprocessed and f"not post-processed: {result.unprocessed}"]
        else:
            cells.append(result.outcome)
            notes.append(f"{layout}: {result.reason}")
    told = "; ".join(dict.fromkeys(_cell(note) for note in notes if note))
    return f"| {case.name} | " + " | ".join(cells) + f" | {told} |"


def _reason(case: Case, layouts: list[str], found: Found) -> str:
    for layout in layouts:
        result = found.get((case.name, layout))
        if result is not None:
            return f"| {case.name} | {result.outcome}: {_cell(result.reason)} |"
    return f"| {case.name} | not run |"


def _cell(text: str) -> str:
    return text[:160].replace("|", "/").replace("<", "&lt;")
