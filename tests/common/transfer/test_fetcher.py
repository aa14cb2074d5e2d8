"""The fetcher without faults: bytes, order, memory, re-use, ends."""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from fastload_common.errors import OutOfBudgetError, StagingError
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.testing.scripted_source import ScriptedSource
from fastload_common.transfer import run as run_module
from fastload_common.transfer.run import Filled
from tests.common.transfer.transfer_bench import (
    CHUNK_BYTES,
    Bench,
    MakeFetcher,
    content,
    receiving_threads,
)


def test_every_byte_of_every_object(make: MakeFetcher) -> None:
    bench: Bench = make(ScriptedSource({"a": content(12_345), "b": content(999, seed=1)}))
    chunks = bench.chunks("a") + bench.chunks("b")
    assert bench.read(chunks) == bench.expected(chunks)
    found = bench.stats.snapshot()
    assert found["requests"] == len(chunks) == 14
    assert found["bytes_received"] == 12_345 + 999
    assert found["retries"] == found["bytes_refetched"] == 0


def test_nothing_to_fetch_starts_nothing(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({}))
    assert bench.read([]) == {}
    assert receiving_threads() == []


def test_the_interpreter_hands_its_lock_over_sooner_meanwhile(make: MakeFetcher) -> None:
    before_s = sys.getswitchinterval()
    bench = make(ScriptedSource({"a": content(5_000)}))
    during_s = []
    for filled in bench.fetcher.fetch(bench.chunks()):
        during_s.append(sys.getswitchinterval())
        filled.release()
    assert max(during_s) < before_s == sys.getswitchinterval()


def test_requests_begin_in_the_order_given(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(20_000)}), concurrency=1)
    chunks = bench.chunks()[::-1]
    bench.read(chunks)
    assert [request.byte_range for request in bench.source.requests] == [
        chunk.byte_range for chunk in chunks
    ]


def test_all_connections_are_in_use_at_once(make: MakeFetcher) -> None:
    gate = threading.Event()
    bench = make(ScriptedSource({"a": content(20_000)}, gate=gate), concurrency=6, slots=8)
    chunks = bench.chunks()
    thread = threading.Thread(target=bench.read, args=(chunks,))
    thread.start()
    for _ in range(6):
        assert bench.source.request_began.acquire(timeout=10)
    assert {request.byte_range for request in bench.source.requests} == {
        chunk.byte_range for chunk in chunks[:6]
    }
    gate.set()
    thread.join(10)
    assert bench.source.peak_in_flight == 6


def test_memory_bounds_the_requests_in_flight(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(30_000)}), concurrency=8, slots=3)
    held: list[Filled] = []
    for count, filled in enumerate(bench.fetcher.fetch(bench.chunks()), start=1):
        held.append(filled)
        if len(held) == 3:  # every slot is in our hands: no further request can have begun
            assert bench.arena.leased_count == 3
            assert len(bench.source.requests) == count
            while held:
                held.pop().release()
    assert held == []
    assert bench.source.peak_in_flight <= 3
    assert bench.arena.peak_leased_bytes == 3 * CHUNK_BYTES


def test_short_ranges_take_no_whole_slots(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(2000)}), slots=4)
    chunks = bench.chunks(size_bytes=10)
    assert bench.read(chunks) == bench.expected(chunks)
    assert bench.arena.peak_leased_bytes <= 4 * 10


def test_one_slot_and_many_connections_do_not_deadlock(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(50_000)}), concurrency=16, slots=1)
    chunks = bench.chunks()
    assert bench.read(chunks) == bench.expected(chunks)


def test_connections_are_kept_between_fetches(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(20_000)}))
    for _ in range(5):
        bench.read(bench.chunks())
    assert bench.source.receivers_opened <= 4
    assert bench.stats.snapshot()["new_connections"] == bench.source.receivers_opened


def test_small_fetches_use_one_thread_and_one_connection(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(20_000)}), concurrency=32)
    for chunk in bench.chunks():
        assert bench.read([chunk]) == bench.expected([chunk])
    assert len(receiving_threads()) == 1
    assert bench.source.receivers_opened == 1


def test_data_is_exactly_the_range_and_gone_after_release(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(300)}))
    [chunk] = bench.chunks()
    for filled in bench.fetcher.fetch([chunk]):
        data = filled.data
        assert len(data) == 300
        filled.release()
        filled.release()
        with pytest.raises(ValueError, match="released"):
            bytes(data)
    assert bench.arena.leased_count == 0


@pytest.mark.parametrize("size_bytes", [0, CHUNK_BYTES + 1])
def test_a_chunk_that_fits_no_slot_is_refused_at_once(make: MakeFetcher, size_bytes: int) -> None:
    bench = make(ScriptedSource({"a": content(5000)}))
    chunk = Chunk(bench.source.object_id("a"), ByteRange(0, size_bytes), size_bytes)
    with pytest.raises(OutOfBudgetError, match=f"chunk of {size_bytes} bytes.*slots of 1000"):
        bench.fetcher.fetch([chunk])
    assert bench.source.requests == []


def test_two_fetches_at_once_are_refused(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(5000)}))
    first = bench.fetcher.fetch(bench.chunks())
    next(first).release()
    with pytest.raises(RuntimeError, match="one fetch at a time"):
        next(bench.fetcher.fetch(bench.chunks()))
    first.close()
    assert bench.read(bench.chunks()) == bench.expected(bench.chunks())


def test_s25_a_forked_child_cannot_use_or_disturb_the_parents_fetcher(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(5000)}))
    bench.read(bench.chunks())
    child = os.fork()
    if child == 0:  # nothing may leave this branch
        status = 1
        try:
            next(bench.fetcher.fetch(bench.chunks()))
        except RuntimeError as error:
            bench.fetcher.close()
            status = 0 if "parent process" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bench.read(bench.chunks()) == bench.expected(bench.chunks())


@pytest.mark.parametrize("stuck", ["in flight", "waiting"])
def test_a_silence_is_told(
    make: MakeFetcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stuck: str,
) -> None:
    monkeypatch.setattr(run_module, "_STALL_WARNING_S", 0.05)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(run_module._log, "warning", lambda text, *args: said.put(text % args))
    gate = threading.Event()
    bench = make(ScriptedSource({"a": content(3000)}, gate=gate), slots=2)
    running = bench.fetcher.fetch(bench.chunks())
    held: list[Filled] = []
    if stuck == "waiting":
        gate.set()
        held += [next(running), next(running)]
    thread = threading.Thread(target=lambda: held.append(next(running)))
    thread.start()
    expected = {
        "in flight": "0 of 3 ranges are there, 2 requests in flight",
        "waiting": "2 of 3 ranges are there, 0 requests in flight (1 ranges wait",
    }
    # The first lines may come before the requests do.
    while expected[stuck] not in (message := said.get(timeout=10)):
        pass
    gate.set()
    if stuck == "waiting":
        assert "whoever places holds" in message
        held[0].release()
    thread.join(10)
    running.close()
    for filled in held:
        filled.release()


def test_a_closed_fetcher_is_refused(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(5000)}))
    bench.fetcher.close()
    bench.fetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        bench.read(bench.chunks())


def test_closing_the_fetcher_ends_a_fetch_that_runs(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(9000)}))
    running = bench.fetcher.fetch(bench.chunks())
    next(running).release()
    bench.fetcher.close()
    assert receiving_threads() == []
    with pytest.raises(RuntimeError, match="closed while"):
        next(running)


def test_closing_the_arena_ends_a_fetch_that_waits_for_it(make: MakeFetcher) -> None:
    bench = make(ScriptedSource({"a": content(9000)}), slots=1)
    running = bench.fetcher.fetch(bench.chunks())
    filled = next(running)
    bench.arena.close()
    with pytest.raises(StagingError, match="staging memory was closed"):
        next(running)
    filled.release()


def test_a_dropped_fetcher_ends_its_threads() -> None:
    source = ScriptedSource({"a": content(5000)})
    bench = Bench(source)
    bench.read(bench.chunks())
    threads = [t for t in threading.enumerate() if t.name.startswith("fastload-receive")]
    assert threads
    gone = weakref.ref(bench.fetcher)
    del bench
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(10)
    assert receiving_threads() == []
    assert source.receivers_open == 0


ABANDON = """
import threading
from fastload_common.clock import SystemClock
from fastload_common.plan.records import Chunk
from fastload_common.ranges import ByteRange
from fastload_common.staging.arena import Arena
from fastload_common.testing.scripted_source import Fault, ScriptedSource
from fastload_common.transfer.fetcher import Fetcher
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.stats import TransferStats

source = ScriptedSource({"a": bytes(3000)}, {("a", 3000): [Fault(stalls=True)]})
policy = TransferPolicy(4, 3, 5, 5)
fetcher = Fetcher(source, Arena(1000, 4), policy, SystemClock(), TransferStats())
object_id = source.object_id("a")
running = fetcher.fetch(
    [Chunk(object_id, ByteRange(start, start + 1000), 1000) for start in (0, 1000, 2000)]
)
held = [next(running), next(running)]
print("end of main")
"""


INTERRUPTED = ABANDON.replace(
    'print("end of main")',
    """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits "ignore"
try:
    print("waiting", flush=True)
    next(running)
finally:
    fetcher.close()
    left = [t.name for t in threading.enumerate() if t.name.startswith("fastload")]
    print("left:", left, flush=True)
""",
)


def test_a_real_interrupt_ends_a_stalled_fetch_within_a_second() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert time.monotonic() - began_s < 5  # the interpreter's own end on a busy machine included
    assert out == "left: []\n"
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_an_abandoned_fetch_does_not_keep_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABANDON], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end of main\n", "")
