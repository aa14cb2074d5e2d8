"""``python -m tests.faults.run_storm``: thousands of random storms, several processes at once.

Exit status 1: some load did not come to what it may; each one is shown, with the command that runs
it again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import Rig
from tests.faults.storm import Weather, ride_out
from tests.faults.storm_shapes import blocks

_NAME = "tests.faults.run_storm"
_ROOT = Path(__file__).parents[2]
_HANG_S = 120.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {_NAME}", description=__doc__)
    parser.add_argument("--loads", type=int, default=2000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, action="append", help="only this one")
    parser.add_argument("--workers", type=int, default=8, help="processes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    seeds = options.seed or range(options.first, options.first + options.loads)
    if options.part is not None:
        _work(list(blocks(seeds)), *map(int, options.part.split("/")))
        return 0
    began_s = time.monotonic()
    found = _run_all(arguments, options.workers)
    print(_summary(found, time.monotonic() - began_s), flush=True)
    return 1 if found["bad"] or found["workers"] else 0


def _run_all(arguments: Sequence[str], workers: int) -> dict[str, Any]:
    """All parts at once; shows what is bad as it comes."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", _NAME, *arguments, "--part", f"{part}/{workers}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        for part in range(workers)
    ]
    with ThreadPoolExecutor(workers) as pool:
        found = list(itertools.chain.from_iterable(pool.map(_rows, processes)))
    return {
        "ended": Counter(row["ended"] for row in found),
        "bad": sum(bool(row["bad"]) for row in found),
        "longest": max(((row["took_s"], row["seed"]) for row in found), default=(0.0, None)),
        "workers": [process.returncode for process in processes if process.returncode],
    }


def _rows(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a worker says of its loads."""
    assert process.stdout is not None
    found = []
    with process, process.stdout:
        for line in process.stdout:
            row = json.loads(line)
            found.append(row)
            if row["bad"]:
                print(f"{row['text']}\n  python -m {_NAME} --seed {row['seed']}", flush=True)
    return found


def _summary(found: dict[str, Any], took_s: float) -> str:
    total = sum(found["ended"].values())
    kinds = ", ".join(f"{count} {name}" for name, count in found["ended"].most_common())
    longest_s, seed = found["longest"]
    said = (
        f"{total} loads in {took_s:.0f} s, the longest {longest_s:.1f} s (seed {seed}): {kinds}; "
    )
    said += f"{found['bad']} bad"
    return said + (f"; workers ended with {found['workers']}" if found["workers"] else "")


def _work(all_blocks: list[list[int]], part: int, parts: int) -> None:
    """A process's part: plain in the even ones, TLS in the odd ones, if there is more than one."""
    faulthandler.dump_traceback_later(_HANG_S, exit=True)
    logging.getLogger("fastload_common").setLevel(logging.ERROR)
    for name in [name for name in os.environ if name.startswith(("AWS_", "FASTLOAD_"))]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as directory:
        for tls in (False, True):
            mine = [block for block in all_blocks if block[0] % 2 == tls][part::parts]
            if mine:
                with weather(Path(directory), tls) as found:
                    for block in mine:
                        _ride(found, block)


def _ride(found: Weather, block: list[int]) -> None:
    for outcome in ride_out(found, block):
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        row = {
            "seed": outcome.seed,
            "ended": outcome.ended,
            "took_s": outcome.took_s,
            "bad": outcome.faults,
            "text": str(outcome),
        }
        print(json.dumps(row), flush=True)


@contextlib.contextmanager
def weather(directory: Path, tls: bool) -> Iterator[Weather]:
    """A rig of this process; leaves its variables in the environment."""
    context = None
    if tls:
        authority = PrivateAuthority(directory)
        context = authority.server_context("127.0.0.1")
        os.environ["AWS_CA_BUNDLE"] = str(authority.bundle)
    with Rig(tls=context) as rig:
        os.environ.update(rig.environ())
        yield Weather(rig, tls)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
