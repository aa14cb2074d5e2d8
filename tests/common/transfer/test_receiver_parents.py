"""What becomes of receiver processes when their parent dies, is interrupted, forks, or forgets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastload_common.testing.fault_server import Fault, FaultServer
from tests.common.transfer.lanes_bench import receiver_pids, until

SIZE = 100_000

# Starts an attempt that stalls, says so, and then does as it is told.
PROGRAM = """
import os, signal, sys, threading
from fastload_common.config import Settings
from fastload_common.ranges import ByteRange
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena
from fastload_common.transfer.lanes import Attempt, Done, Progress
from fastload_common.transfer.mailbox import Mailbox
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.routed_lanes import open_lanes

source = open_source("s3://bucket/m", Settings())
arena, mailbox = Arena(100_000, 4), Mailbox()
lanes = open_lanes(source, arena, TransferPolicy(2, 3, 5, 20), mailbox)
slot = arena.try_lease()
object_id = source.stat("key")
lanes.start(Attempt(1, object_id, ByteRange(0, 100_000), slot.memory, slot.position_bytes))
lanes.flush()
while not any(isinstance(event, Progress) for event in mailbox.wait(1)):
    pass
how = sys.argv[1]
if how == "forks":
    if os.fork() == 0:
        signal.pause()
print("ready", flush=True)
if how == "exits":
    sys.exit(0)
elif how == "raises":
    raise KeyError("on purpose")
elif how == "exits in a thread's way":
    threading.Thread(target=lambda: [mailbox.wait(0.1) for _ in range(1000)], daemon=True).start()
    sys.exit(0)
elif how == "closes at exit":
    import atexit
    atexit.register(lanes.close)
    sys.exit(0)
elif how == "forgets":
    del lanes
sys.stdin.read()
"""


@pytest.fixture
def server(fault_server: FaultServer) -> FaultServer:
    fault_server.put("bucket", "m/key", bytes(SIZE))
    fault_server.script("GET", "bucket/m/key", [], then=Fault(stall_after_bytes=1000))
    return fault_server


class Parent:
    """A process that has receivers, and their ids."""

    def __init__(self, how: str, group: int | None = None) -> None:
        root = Path(__file__).parents[3]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
            process_group=group,
        )
        assert self.process.stdout is not None
        self.receivers: list[int] = []
        if how in ("stays", "forks", "forgets"):
            assert self.process.stdout.readline() == "ready\n"
            self.receivers = receiver_pids(self.process.pid)
            assert len(self.receivers) == 1

    def end(self) -> str:
        """Wait for the end; what was printed on stderr."""
        try:
            return self.process.communicate(timeout=30)[1]
        finally:
            self.process.kill()
            self.process.wait()


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def test_they_end_with_a_parent_that_is_killed(server: FaultServer) -> None:
    parent = Parent("stays")
    parent.process.kill()
    parent.process.wait()
    until(lambda: not any(map(is_running, parent.receivers)), "the receivers end", 2)
    parent.end()


def test_they_end_although_a_forked_process_has_the_socket(server: FaultServer) -> None:
    parent = Parent("forks", group=0)
    group = parent.process.pid
    try:
        parent.process.kill()
        parent.process.wait()
        until(lambda: not any(map(is_running, parent.receivers)), "the receivers end", 4)
    finally:
        os.killpg(group, signal.SIGKILL)
    parent.end()


@pytest.mark.parametrize("how", ["exits", "raises", "exits in a thread's way", "closes at exit"])
def test_a_process_that_ends_without_closing_ends_soon_and_says_nothing(
    server: FaultServer, how: str
) -> None:
    parent = Parent(how)
    said = parent.end()
    assert parent.process.returncode == (1 if how == "raises" else 0)
    said = said.replace("KeyError: 'on purpose'", "")
    for complaint in ("Exception ignored", "Error", "Warning", "fastload-recv"):
        assert complaint not in said


def test_an_interrupt_from_the_terminal_leaves_them_to_their_parent(server: FaultServer) -> None:
    parent = Parent("stays", group=0)
    os.killpg(parent.process.pid, signal.SIGINT)
    said = parent.end()
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    until(lambda: not any(map(is_running, parent.receivers)), "the receivers end", 2)


# What a receiver imports, and what that costs.

IMPORTS = """
import sys, time
begun = set(sys.modules)
sys.path.append(sys.argv[1])
import fastload_common.transfer.receiver_main
print(" ".join(sorted(set(sys.modules))))
"""


def test_only_the_standard_library_and_little_of_this_package_is_imported() -> None:
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORTS, str(root)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    modules = found.stdout.split()
    names = {name.partition(".")[0] for name in modules}
    foreign = names - set(sys.stdlib_module_names) - {"fastload_common", "__main__"}
    assert {name for name in foreign if not name.startswith("_")} == set()
    for heavy in ("asyncio", "http", "email", "subprocess", "multiprocessing", "ctypes", "xml"):
        assert heavy not in names
    ours = {name for name in modules if name.startswith("fastload_common.")}
    assert not any(name.startswith("fastload_common.config") for name in ours)
    assert not any(".s3" in name for name in ours)
