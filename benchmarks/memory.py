"""Peak host memory against the budget, at any concurrency.

    python -m benchmarks.memory [--json] [--quick]

HTTP and TLS; 8, 32, 128 and 512 requests in flight; budgets (FASTLOAD_MEMORY_BYTES) of 64 MiB,
256 MiB and 1 GiB. More is received than the budget holds, and the consumer waits with the first
chunk in its hands until staging memory has filled.

What counts: the proportional set sizes of the process and its children, and memfds with all of
their pages, sampled every 20 ms from outside, minus what the process had before staging memory
and fetcher were made (interpreter, boto3, one client for small calls). The bar: budget + 5 %.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.measure import ClientFailedError, measure
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of, programs_or_none, schemes_of
from benchmarks.server import S3Server
from benchmarks.work import Work, objects_of
from fastload_common.units import GIB, MIB, format_size

CONCURRENCIES: tuple[int, ...] = (8, 32, 128, 512)
BUDGETS_BYTES: tuple[int, ...] = (64 * MIB, 256 * MIB, 1 * GIB)
OBJECT_BYTES = 256 * MIB
SAMPLE_EVERY_S = 0.02
BAR = 1.05


def run(
    programs: Programs,
    schemes: list[str],
    concurrencies: tuple[int, ...],
    budgets_bytes: tuple[int, ...],
) -> list[dict[str, Any]]:
    """One row for each scheme, concurrency and budget."""
    rows = []
    # A quarter more than the largest budget.
    items = objects_of(-(-max(budgets_bytes) * 5 // 4 // OBJECT_BYTES), OBJECT_BYTES)
    for scheme in schemes:
        with S3Server(programs, items, tls=scheme == "https") as server:
            for budget_bytes in budgets_bytes:
                taken = items[: -(-budget_bytes * 5 // 4 // OBJECT_BYTES)]
                for concurrency in concurrencies:
                    row: dict[str, Any] = {"scheme": scheme, "concurrency": concurrency}
                    row["budget_bytes"] = budget_bytes
                    options = {"settings": {"memory_bytes": budget_bytes}, "fill": True}
                    work = Work("fastload", taken, 0, concurrency, options=options)
                    rows.append(row | _figures(work, budget_bytes, server, programs))
    return rows


def _figures(work: Work, budget_bytes: int, server: S3Server, programs: Programs) -> dict[str, Any]:
    try:
        cost = measure(work, server, programs, sample_every_s=SAMPLE_EVERY_S)
    except ClientFailedError as error:
        return {"failed": str(error)}
    if not cost.ended:
        return {"failed": "did not end in time"}
    return {
        "peak_bytes": cost.staging_peak_bytes,
        "share": round(cost.staging_peak_bytes / budget_bytes, 4),
        "wall_s": round(cost.wall_s, 3),
        "connections": cost.server["connections"],
    }


def _label(row: dict[str, Any]) -> str:
    budget = format_size(row["budget_bytes"])
    return f"{row['scheme']}, {budget}, {row['concurrency']} in flight"


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = found["rows"]
    drawn = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        own = [row for row in rows if row["scheme"] == scheme]
        series = {"peak / budget": {_label(row): row["share"] for row in own if "share" in row}}
        notes = {_label(row): "failed" for row in own if "failed" in row}
        title = f"Peak memory above the start, {scheme}"
        drawn.append(Panel(title, "share of the budget", series, {f"bar {BAR}": BAR}, notes))
    return drawn


def main() -> int:
    parser, directory = options_of(__doc__)
    options = parser.parse_args()
    concurrencies, budgets_bytes = CONCURRENCIES, BUDGETS_BYTES
    if options.quick:
        concurrencies, budgets_bytes = CONCURRENCIES[1::2], BUDGETS_BYTES[:2]
    if options.scale != 1:
        concurrencies, budgets_bytes = CONCURRENCIES[:1], BUDGETS_BYTES[:1]
    with programs_or_none(options.json) as programs:
        if programs is None:
            return 0
        found: dict[str, Any] = {"benchmark": "memory", "absent": {}}
        schemes = schemes_of(programs, found)
        found["rows"] = run(programs, schemes, concurrencies, budgets_bytes)
    if not options.json:
        for row in found["rows"]:
            peak = format_size(row["peak_bytes"]) if "peak_bytes" in row else row["failed"]
            print(f"{_label(row):36} {peak:>12} {row.get('share', '-'):>7} of the budget")
    worst = max((row["share"] for row in found["rows"] if "share" in row), default=None)
    failed = next((row["failed"] for row in found["rows"] if "failed" in row), None)
    bars = [Bar("most memory of any run, share of its budget", worst, BAR, failed=failed)]
    return finish("memory", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
