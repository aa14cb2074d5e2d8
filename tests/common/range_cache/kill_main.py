"""``python -m tests.common.range_cache.kill_main DIRECTORY ROUNDS``: writers that are killed.

Forks processes that write the same object into one cache, and kills them at random moments; what
they left is read after each round. Prints the bytes that were good, that were damaged, and how many
were killed in the middle, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from fastload_common.range_cache.entry import Entry, Identity
from fastload_common.range_cache.records import BLOCK_BYTES
from fastload_common.ranges import ByteRange, ObjectId

SIZE_BYTES = 48 * BLOCK_BYTES + 77
DATA = random.Random(3).randbytes(SIZE_BYTES)
IDENTITY = Identity("", ObjectId("s3://b/k", '"e"', SIZE_BYTES))
STEP_BYTES = 300_001


def write(directory: Path, seed: int) -> None:
    entry = Entry(directory, IDENTITY, writable=True)
    entry.open(create=True)
    ranges = list(ByteRange(0, SIZE_BYTES).pieces(STEP_BYTES))
    random.Random(seed).shuffle(ranges)
    for byte_range in ranges:
        entry.write(byte_range, memoryview(DATA)[byte_range.start : byte_range.end])


def look(directory: Path) -> tuple[int, int]:
    """Bytes that are good, and bytes that are not what was recorded; none is both."""
    entry = Entry(directory, IDENTITY, writable=False)
    good = bad = 0
    if entry.open():
        memory = bytearray(SIZE_BYTES)
        for held in entry.coverage.cover(ByteRange(0, SIZE_BYTES)).held:
            damaged = entry.read(held, memoryview(memory), 0)
            bad += sum(piece.end - piece.start for piece in damaged)
            part = held.wanted
            if not damaged:
                assert memory[part.start : part.end] == DATA[part.start : part.end]
                good += part.size_bytes
    entry.close()
    return good, bad


def main(directory: Path, rounds: int) -> None:
    directory.mkdir()
    shuffled = random.Random(rounds)
    killed = bad = 0
    seen = [0]
    for number in range(rounds):
        pids = []
        for k in range(2):
            pid = os.fork()
            if not pid:
                write(directory, 2 * number + k)
                os._exit(0)
            pids.append(pid)
        time.sleep(shuffled.random() * 0.03)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        good, damaged = look(directory)
        bad += damaged
        seen.append(good)
        if good == SIZE_BYTES:
            for path in directory.iterdir():
                path.unlink()
    write(directory, 0)
    print(json.dumps({"seen": seen, "bad": bad, "killed": killed, "end": look(directory)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
