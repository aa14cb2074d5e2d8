"""One client, alone in this process: receives the work and prints what it cost, as JSON.

    python -m benchmarks.clients.run WORK_AS_JSON

The endpoint, credentials and CA bundle come from the usual AWS variables.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, Protocol

from benchmarks.cost import cpu_s, memory_bytes
from benchmarks.work import Item, Work

_WARM_ROUNDS = 2
_PR_SET_PDEATHSIG = 1


class Client(Protocol):
    """What a module of this directory gives with `open_client(work)`."""

    def receive(self, items: tuple[Item, ...]) -> int:
        """Receive the objects and check their bytes; how many came."""
        ...

    def close(self) -> None:
        """End connections, threads and processes."""
        ...


class BusyThread:
    """Computes in Python until it is stopped, as an engine's main thread does."""

    def __init__(self) -> None:
        self._stop = False
        self._cpu_s = 0.0
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """End it; the CPU seconds that it had."""
        self._stop = True
        self._thread.join()
        return self._cpu_s

    def _compute(self) -> None:
        total = 0
        while not self._stop:
            for number in range(1000):
                total += number
        self._cpu_s = time.thread_time()


def end_with_parent() -> None:
    """A benchmark that is killed leaves no client behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(text: str) -> None:
    end_with_parent()
    work = Work.from_json(text)
    module = importlib.import_module(f"benchmarks.clients.{work.client}")
    baseline_bytes = memory_bytes(os.getpid())
    opened_s = time.monotonic()
    client: Client = module.open_client(work)
    for _ in range(_WARM_ROUNDS if work.warm else 0):
        assert work.warm is not None
        client.receive((work.warm,))
    # Reading the CPU seconds of all processes takes long beside a thread that computes.
    cpu_began_s = cpu_s()
    busy = BusyThread() if work.busy_thread else None
    began_s = time.monotonic()
    size_bytes = client.receive(work.items)
    ended_s = time.monotonic()
    busy_s = busy.stop() if busy else 0.0
    cpu_ended_s = cpu_s()
    found: dict[str, Any] = {
        "bytes": size_bytes,
        "wall_s": ended_s - began_s,
        "ended_s": ended_s,
        "setup_s": began_s - opened_s,
        "baseline_bytes": baseline_bytes,
        "staging_baseline_bytes": getattr(client, "baseline_bytes", baseline_bytes),
    }
    found["busy_cpu_s"] = busy_s
    found["cpu_s"] = cpu_ended_s - cpu_began_s - busy_s
    assert size_bytes == work.total_bytes, f"{size_bytes} of {work.total_bytes} bytes"
    print(json.dumps(found), flush=True)
    client.close()


if __name__ == "__main__":
    main(sys.argv[1])
    # Some of the measured libraries do not end at the interpreter's exit.
    os._exit(0)
