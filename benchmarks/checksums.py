"""What FASTLOAD_VERIFY costs: CRCs over staging slots, and putting them together.

    python -m benchmarks.checksums [--gib 1]

Prints one line of JSON for each algorithm: bytes per CPU second over memory that is in no cache,
through the same code as in a load; how long another Python thread waits while one CRC over all of
it runs (the interpreter's lock); microseconds for putting one piece to the rest.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fastload_common.checksums.algorithms import ALGORITHMS, Algorithm, Checksum, crc_function
from fastload_common.checksums.combine import combine
from fastload_common.load.report import LoadReport
from fastload_common.load.verify import Verification
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.testing.scripted_source import ScriptedSource
from fastload_common.units import GIB, MIB

CHUNK_BYTES = 8 * MIB
COMBINED = 2000


@dataclass
class Slot:
    """A chunk that is there at once."""

    chunk: Chunk
    data: memoryview

    def release(self) -> None:
        """Nothing is held."""


class OneObject(ScriptedSource):
    """Says what the checksum is; is never read."""

    def __init__(self, checksum: Checksum) -> None:
        super().__init__({})
        self.checksum = checksum

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        return self.checksum


def seconds_in_a_load(algorithm: Algorithm, memory: memoryview) -> float:
    """CPU seconds that a verified fetch takes more than one that is not."""
    crc = crc_function(algorithm)
    object_id = ObjectId("s3://bucket/model/key", '"etag"', len(memory))
    chunks = [
        Chunk(object_id, ByteRange(start, min(start + CHUNK_BYTES, len(memory))), 1)
        for start in range(0, len(memory), CHUNK_BYTES)
    ]

    def fetch(chunks: Iterable[Chunk]) -> Iterator[Slot]:
        for chunk in chunks:
            yield Slot(chunk, memory[chunk.byte_range.start : chunk.byte_range.end])

    taken = []
    for mode in ("off", "covered"):
        verification = Verification(mode, LoadReport("bench", "", "memory", 0))
        see = verification.starts(OneObject(Checksum(algorithm, crc(memory))))
        if see is not None:
            see(object_id, b"")
        watched = verification.watch(fetch, CHUNK_BYTES)
        started_s = time.thread_time()
        for filled in watched(chunks):
            filled.release()
        verification.finish()
        taken.append(time.thread_time() - started_s)
    return taken[1] - taken[0]


def longest_wait_s(algorithm: Algorithm, memory: memoryview) -> float:
    """Of a thread that only looks at the clock, while another one computes one CRC."""
    crc = crc_function(algorithm)
    done = threading.Event()

    def compute() -> None:
        crc(memory)
        done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    longest_s, last_s = 0.0, time.perf_counter()
    while not done.is_set():
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    thread.join()
    return longest_s


def combine_us(algorithm: Algorithm) -> float:
    """Microseconds to put one more piece to the rest."""
    value = 1
    started_s = time.thread_time()
    for k in range(COMBINED):
        value = combine(algorithm, value, k, CHUNK_BYTES)
    return (time.thread_time() - started_s) / COMBINED * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    arguments = parser.parse_args()
    memory = memoryview(bytearray(b"\xa5" * int(arguments.gib * GIB)))
    for algorithm in ALGORITHMS:
        times_s = [seconds_in_a_load(algorithm, memory) for _ in range(3)]
        row = {
            "algorithm": algorithm.name,
            "cpu_s_per_gib": round(sorted(times_s)[1] * GIB / len(memory), 4),
            "gb_per_s": round(len(memory) / sorted(times_s)[1] / 1e9, 1),
            "longest_wait_of_another_thread_s": round(longest_wait_s(algorithm, memory), 4),
            "combine_us": round(combine_us(algorithm), 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
