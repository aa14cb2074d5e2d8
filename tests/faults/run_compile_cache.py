"""``python -m tests.faults.run_compile_cache``: servers that start in pairs, through everything.

The two servers of a pair start at once on one node: with the same key or two, with one cache
directory or one each (two containers on one hostPath), sometimes as another user, by a clock that
is wrong. In most pairs one is killed: at a random moment, or while it compiles, unpacks, packs,
stores, uploads or seals. Between pairs, and during some, entries on the node and in S3 are damaged
at every class of their bytes. Half of the pairs run with signed entries.

Whoever is not killed must answer rightly, and all that it finds must be whole, of its own key and
of one compilation. After each pair the same keys are started again, twice: the second must find
what it needs. Prints JSON; exit status 1: something went otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
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

from fastload_common.compile_cache.key import key_of
from fastload_common.testing.s3_server import S3Server
from tests.common.compile_cache.artefacts import FACTORS, write_keys
from tests.faults.compile_damage import (
    KINDS,
    PLACES,
    SKEWS_S,
    damage_in_bucket,
    damage_in_directory,
    skew_times,
)
from tests.faults.compile_process import ServerProcess
from tests.faults.compile_server import MOMENTS, NOBODY, answer_of

KEYS = 3
BUCKET = "storm"
LONGEST_S = 90.0
_MODES = {True: 0o1777, False: 0o755}


@dataclass
class Tally:
    """What all pairs came to."""

    pairs: int = 0
    starts: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    measured: Counter[str] = field(default_factory=Counter)
    shape: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    start_s: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    """What one pair is like; made of its seed."""

    keys: tuple[int, int]
    two_containers: bool
    other_user: bool
    skew_s: float
    victim: int | None
    moment: str
    delay_s: float
    empty_node: bool
    damage: tuple[tuple[str, str, str], ...]
    late: bool

    @classmethod
    def of(cls, random: Random, number: int, may_switch: bool) -> Shape:
        same = random.random() < 0.6
        first = random.randrange(KEYS)
        damage = []
        empty = random.random() < 0.3
        if random.random() < 0.8:
            # In turn, so that every class of bytes has its pairs.
            place, kind = PLACES[number // 2 % len(PLACES)], random.choice(KINDS)
            stores = ["s3"] if empty else random.choice([["node"], ["s3"], ["node", "s3"]])
            damage = [(store, place, kind) for store in stores]
        two_containers = random.random() < 0.5
        return cls(
            keys=(first, first if same else (first + 1) % KEYS),
            two_containers=two_containers,
            other_user=two_containers and may_switch and random.random() < 0.5,
            skew_s=random.choice([0.0, 0.0, *SKEWS_S]),
            victim=random.choice([0, 1, 0, 1, None]),
            moment=random.choice(["any", *MOMENTS]),
            delay_s=random.random(),
            empty_node=empty,
            damage=tuple(damage),
            late=random.random() < 0.3,
        )

    def words(self) -> list[str]:
        return [
            "same key" if self.keys[0] == self.keys[1] else "two keys",
            "two containers" if self.two_containers else "one directory",
            *(["another user"] if self.other_user else []),
            *(["wrong clock"] if self.skew_s else []),
            *(["empty node"] if self.empty_node else []),
            *(["damage"] if self.damage else []),
        ]


class World:
    """One node, with a hostPath and a prefix in S3, for all pairs of one kind."""

    def __init__(self, place: Path, server: S3Server, prefix: str, *, signed: bool) -> None:
        self.place = place
        self.prefix = prefix
        self.client = server.client()
        self.node = place / "hostPath"
        place.mkdir(mode=0o755)
        self._mode = _MODES[signed]
        self.variables = {
            **server.environ(),
            "FASTLOAD_COMPILE_CACHE": f"{self.node},s3://{BUCKET}/{prefix}",
            "FASTLOAD_COMPILE_CACHE_DEADLINE_S": "30",
        }
        if signed:
            private, _ = write_keys(place)
            private.chmod(0o644)  # the other user of this test signs as well
            self.variables["FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE"] = str(private)
        self.renew()

    def renew(self) -> None:
        """The disk of a new node."""
        for path in self.place.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        base = self.node / "v1"
        made = ["entries", "drafts", "locks", "quarantine"] if self._mode & 0o002 else []
        for path in (self.node, *([base] if made else []), *(base / name for name in made)):
            path.mkdir()
            path.chmod(self._mode)

    def container(self, name: str, *, other_user: bool = False) -> Path:
        path = self.place / name
        path.mkdir(exist_ok=True)
        if other_user:
            os.chown(path, NOBODY, NOBODY)
        return path

    def damage(self, key: str, store: str, place: str, kind: str, random: Random) -> bool:
        if store == "node":
            return damage_in_directory(self.node, key, place, kind, random)
        return damage_in_bucket(self.client, BUCKET, self.prefix, key, place, kind, random)


class Storm:
    """Rides through pairs, one at a time."""

    def __init__(self, worlds: Sequence[World], options: argparse.Namespace) -> None:
        self._worlds = worlds
        self._options = options
        # What torch makes holds the path of its directory: it may be of use to that one only.
        self._found = ("hit", "warm") if options.torch else ("hit",)
        self._may_switch = os.geteuid() == 0
        self.tally = Tally()
        if not self._may_switch:
            self.tally.shape["another user: cannot be tried here"] = 1

    def ride(self, number: int) -> None:
        """One pair, and the starts that must find all in order after it."""
        random = Random(number)
        world = self._worlds[number % len(self._worlds)]
        shape = Shape.of(random, number, self._may_switch)
        tally = self.tally
        tally.pairs += 1
        tally.shape.update(shape.words())
        if shape.empty_node:
            world.renew()
        if shape.skew_s:
            skew_times([world.place], shape.skew_s)
        if not shape.late:
            self._damage(world, shape, random)
        processes = [self._start(world, shape, which) for which in (0, 1)]
        began_s = time.monotonic()
        last = ""
        if shape.victim is not None:
            last = processes[shape.victim].kill_at(shape.moment, shape.delay_s)
        if shape.late:
            self._damage(world, shape, random)
        for which, process in enumerate(processes):
            row = process.end(LONGEST_S)
            if which == shape.victim and process.was_killed:
                tally.killed[f"after {last}"] += 1
                continue
            self._judge(f"pair {number}, {which}", shape.keys[which], row)
            tally.start_s.append(time.monotonic() - began_s)
        for key in sorted(set(shape.keys)):
            for again in (False, True):
                process = self._start(world, shape, 0, key=key, alone=True)
                row = process.end(LONGEST_S)
                self._judge(f"pair {number}, after it, key {key}", key, row, hit=again)

    def _damage(self, world: World, shape: Shape, random: Random) -> None:
        for store, place, kind in shape.damage:
            key = key_of({**FACTORS, "layout.tensor": random.choice(shape.keys)})
            if world.damage(key, store, place, kind, random):
                self.tally.damaged[f"{store} {place} {kind}"] += 1

    def _start(
        self, world: World, shape: Shape, which: int, *, key: int | None = None, alone: bool = False
    ) -> ServerProcess:
        other_user = shape.other_user and which == 1
        name = "container-nobody" if other_user else f"container-{which * shape.two_containers}"
        self.tally.starts += 1
        job = {
            "key": shape.keys[which] if key is None else key,
            "bytes": self._options.bytes,
            "weights_s": 0.0 if alone else 0.05,
            "skew_s": shape.skew_s if which else 0.0,
            "torch": self._options.torch,
            "user": NOBODY if other_user else None,
        }
        return ServerProcess(world.container(name, other_user=other_user), world.variables, job)

    def _judge(self, who: str, key: int, row: dict[str, Any], *, hit: bool = False) -> None:
        self.tally.measured[row.get("measured", "none")] += 1
        self.tally.warnings.update(row["warnings"])
        faults = []
        if row["status"] != 0 or "fault" in row:
            faults.append(f"status {row['status']}: {row.get('fault', row['stderr'][-500:])}")
        elif row["answer"] != answer_of(key):
            faults.append(f"it answers {row['answer']}")
        elif not row["done"]:
            faults.append("it could not publish in time")
        elif not row["began"]:
            faults.append("it had no cache")
        elif hit and row["measured"] not in self._found:
            faults.append(f"{row['measured']} instead of a hit: {row['outcome']}")
        if "Traceback" in row["stderr"]:
            faults.append(row["stderr"][-500:])
        self.tally.bad += [f"{who}: {fault}" for fault in faults]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run_compile_cache")
    parser.add_argument("--pairs", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--bytes", type=int, default=60_000, help="of one artefact")
    parser.add_argument("--torch", action="store_true", help="compile with torch as well")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="fastload-compile-storm-"))
    work.chmod(0o755)
    try:
        with S3Server() as server:
            server.make_bucket(BUCKET)
            worlds = [
                World(work / name, server, name, signed=name == "signed")
                for name in ("plain", "signed")
            ]
            storm = Storm(worlds, options)
            for number in range(options.first, options.first + options.pairs):
                storm.ride(number)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(_summary(storm.tally, time.monotonic() - began_s)))
    return 1 if storm.tally.bad else 0


def _summary(tally: Tally, took_s: float) -> dict[str, Any]:
    return {
        "pairs": tally.pairs,
        "starts": tally.starts,
        "killed": dict(tally.killed),
        "measured": dict(tally.measured),
        "shapes": dict(tally.shape),
        "damaged": dict(sorted(tally.damaged.items())),
        "warnings": dict(tally.warnings),
        "seconds_of_a_start_in_a_pair": {
            "p50": round(statistics.median(tally.start_s), 2) if tally.start_s else None,
            "max": round(max(tally.start_s), 2) if tally.start_s else None,
        },
        "bad": tally.bad,
        "took_s": round(took_s),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
