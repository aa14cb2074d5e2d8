"""Which lanes an object goes by, and that both kinds work for one owner."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import RemoteSource
from fastload_common.source.composite import CompositeSource
from fastload_common.source.local import LocalSource
from fastload_common.source.registry import open_source
from fastload_common.staging.arena import Arena, Slot
from fastload_common.testing.fault_server import FaultServer
from fastload_common.testing.scripted_source import ScriptedSource
from fastload_common.transfer.lanes import Attempt, Done, Event, Failed
from fastload_common.transfer.mailbox import Mailbox
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.process_lanes import ProcessLanes
from fastload_common.transfer.routed_lanes import open_lanes
from fastload_common.transfer.thread_lanes import ThreadLanes
from tests.common.transfer.lanes_bench import content, receiver_pids

DATA = content(10_000)
POLICY = TransferPolicy(concurrency=3, max_attempts=3, connect_timeout_s=5, read_timeout_s=20)


@pytest.fixture
def server(fault_server: FaultServer) -> FaultServer:
    fault_server.put("bucket", "m/key", DATA)
    return fault_server


class Owner:
    """Runs attempts to their end."""

    def __init__(self, source: CompositeSource | LocalSource | ScriptedSource) -> None:
        self.arena = Arena(10_000, 6)
        self.mailbox = Mailbox()
        self.lanes = open_lanes(source, self.arena, POLICY, self.mailbox)
        self.ids = itertools.count()

    def fetch(self, *objects: ObjectId) -> list[bytes]:
        slots: dict[int, Slot] = {}
        for object_id in objects:
            slot = self.arena.try_lease(object_id.size_bytes)
            assert slot is not None
            attempt_id = next(self.ids)
            slots[attempt_id] = slot
            whole = ByteRange(0, object_id.size_bytes)
            self.lanes.start(
                Attempt(attempt_id, object_id, whole, slot.memory, slot.position_bytes)
            )
        ended: list[Event] = []
        while len(ended) < len(slots):
            self.lanes.flush()
            ended += [e for e in self.mailbox.wait(5) if isinstance(e, Done | Failed)]
        assert all(isinstance(event, Done) for event in ended), ended
        found = [bytes(slot.memory) for slot in slots.values()]
        for slot in slots.values():
            slot.release()
        return found

    def close(self) -> None:
        self.lanes.close()
        self.mailbox.close()
        self.arena.close()


def test_each_object_goes_its_way(server: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA[::-1])
    remote, local = open_source("s3://bucket/m", Settings()), LocalSource(tmp_path)
    source = CompositeSource([remote, local])
    assert isinstance(source, RemoteSource)
    owner = Owner(source)
    stored, file = remote.stat("key"), local.stat("file")
    assert owner.fetch(stored, file, stored) == [DATA, DATA[::-1], DATA]
    kinds = {is_remote: type(lanes) for is_remote, lanes in owner.lanes._made.items()}
    assert kinds == {True: ProcessLanes, False: ThreadLanes}
    assert len(receiver_pids()) == 1
    owner.lanes.set_limit(8)
    assert owner.fetch(stored, file) == [DATA, DATA[::-1]]
    owner.lanes.close()
    owner.lanes.close()
    assert receiver_pids() == []
    with pytest.raises(RuntimeError, match="closed"):
        owner.fetch(stored)
    owner.close()
    remote.close()


def test_files_need_no_receivers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    source = LocalSource(tmp_path)
    owner = Owner(source)
    assert owner.fetch(*[source.stat("file")] * 3) == [DATA] * 3
    assert receiver_pids() == []
    owner.close()


def test_a_source_that_knows_nothing_of_this_goes_by_threads() -> None:
    source = ScriptedSource({"a": DATA})
    owner = Owner(source)
    assert owner.fetch(source.object_id("a")) == [DATA]
    owner.close()
    assert source.receivers_open == 0
