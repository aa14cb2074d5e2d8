"""``python -m tests.faults.run_exchange``: ranks of one host, of which one is killed at any moment.

Eight processes load one model together, each with 64 MiB of staging memory; one of them is ten
times slower than the others, and one is killed at a random moment between the start of its trace
and the end of the load. Each survivor must have the right bytes, or end within 5 s of the end of
that process with an error that names the killed rank; and nothing may be left of it. Prints JSON;
exit status 1: some seed ended otherwise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import save_file

from tests.common.exchange.exchange_harness import make_tensors
from tests.common.exchange.rank_processes import RankProcesses

RANKS = 8
SLOW_S = 0.02  # for each chunk; a copy of a part of one takes about a tenth of it
LIMIT_S = 5.0
_KILL = 9


@dataclass
class Tally:
    """What all seeds came to."""

    ended: Counter[str] = field(default_factory=Counter)
    after_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run_exchange")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--width", type=int, default=2048, help="of the model's matrices")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--memory", default="64MiB", help="staging memory of each rank")
    parser.add_argument("--chunk", default="2MiB", help="size of one staging slot")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="fastload-exchange-storm-"))
    try:
        model_bytes = make_model(work / "model", options.layers, options.width)
        with RankProcesses() as processes:
            storm = Storm(work, processes, options.memory, options.chunk)
            quiet_s = storm.ride(None)
            for seed in range(options.first, options.first + options.seeds):
                storm.ride(seed, quiet_s)
    finally:
        shutil.rmtree(work)
    tally = storm.tally
    print(json.dumps(_summary(tally, model_bytes, quiet_s, time.monotonic() - began_s)))
    return 1 if tally.bad else 0


def make_model(directory: Path, layers: int, width: int) -> int:
    """A checkpoint in two shards; its bytes."""
    directory.mkdir()
    tensors = make_tensors(layers, width, RANKS)
    names = sorted(tensors)
    for part in (0, 1):
        own = {name: tensors[name] for name in names[part::2]}
        save_file(own, directory / f"model-0000{part + 1}-of-00002.safetensors")
    return sum(value.nbytes for value in tensors.values())


class Storm:
    """Rides through seeds, one at a time."""

    def __init__(self, work: Path, processes: RankProcesses, memory: str, chunk: str) -> None:
        self._work, self._processes = work, processes
        number, unit = memory[:-3], memory[-3:]
        self._settings = {"memory_bytes": f"{int(number) * RANKS}{unit}", "chunk_bytes": chunk}
        self.tally = Tally()

    def ride(self, seed: int | None, quiet_s: float = 0.0) -> float:
        """One load; with a seed its victim is killed. How long it took."""
        random = Random(seed)
        slow, victim = random.sample(range(RANKS), 2)
        signals = {}
        if seed is not None:
            signals[str(victim)] = [_KILL, random.uniform(0, quiet_s)]
        directory = self._work / f"seed-{seed}"
        began_s = time.monotonic()
        found = self._processes.run(
            directory,
            str(self._work / "model"),
            RANKS,
            self._work / "model",
            settings=self._settings,
            slow={str(slow): SLOW_S},
            signal=signals,
            limit_s=120,
        )
        took_s = time.monotonic() - began_s
        self.tally.wall_s.append(took_s)
        killed = found["ranks"][victim]["status"] == -_KILL
        for rank, row in enumerate(found["ranks"]):
            if killed and rank == victim:
                continue
            for fault in self._judge(row, victim if killed else None):
                self.tally.bad.append(f"seed {seed}, rank {rank}: {fault}")
        loads = [row["result"]["report"] for row in found["ranks"] if row["result"] is not None]
        shutil.rmtree(directory)
        # Without what is compared afterwards.
        walls = [float(report["wall_s"]) for report in loads]
        return max(walls) - min(float(report["phases_s"]["agree"]) for report in loads)

    def _judge(self, row: dict[str, Any], killed: int | None) -> list[str]:
        """What is wrong with how a rank ended; nothing, mostly."""
        result = row["result"]
        if result is None:
            self.tally.ended["no word"] += 1
            return [f"it ended with status {row['status']} and said nothing"]
        left = [*result["threads"], *result["descriptors"]]
        faults = [f"left: {left}"] if left else []
        error = result["error"]
        if error is None:
            self.tally.ended["right bytes"] += 1
            return faults + [f"wrong: {name}" for name in result["faults"]]
        self.tally.ended[error.partition(":")[0]] += 1
        if killed is None:
            return [*faults, f"an error without a cause: {error}"]
        self.tally.after_s.append(result["failed_s"] - row["hit_s"])
        after_s = result["failed_s"] - row["gone_s"]
        if not (f"rank {killed} (pid" in error and "without a word (killed?)" in error):
            faults.append(f"the cause is not told: {error}")
        if after_s > LIMIT_S:
            faults.append(f"it ended {after_s:.1f} s after the killed one")
        return faults


def _summary(tally: Tally, model_bytes: int, quiet_s: float, took_s: float) -> dict[str, Any]:
    after = sorted(tally.after_s)
    return {
        "ranks": RANKS,
        "model_mib": round(model_bytes / 2**20),
        "seeds": len(tally.wall_s) - 1,
        "quiet_load_s": round(quiet_s, 2),
        "survivors": dict(tally.ended),
        "seconds_from_kill_to_end": {
            "p50": round(statistics.median(after), 3) if after else None,
            "max": round(after[-1], 3) if after else None,
        },
        "bad": tally.bad,
        "took_s": round(took_s),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
