"""What the first reads of a load say of the way to its objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastload_common.config import Settings, load_settings
from fastload_common.errors import ObjectChangedError
from fastload_common.load.first_reads import FirstReads
from fastload_common.load.open_model import open_checkpoint
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.plan.cost import LEAST_GAP_BYTES, MOST_GAP_BYTES, PathCost
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.testing.checkpoints import random_tensor, write_checkpoint
from fastload_common.testing.fake_clock import FakeClock
from tests.common.load.session_harness import Model, load


class SlowDirectory(LocalSource):
    """Each read takes 40 ms, and its bytes 50 MB/s."""

    def __init__(self, directory: Path, clock: FakeClock) -> None:
        super().__init__(directory)
        self._fake = clock

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        data = super().read(object_id, byte_range)
        self._fake.advance(0.04 + len(data) / 50e6)
        return data


def test_headers_tell_the_latency(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {f"t{k}": random_tensor("F32", [4], k) for k in range(8)}, shards=4)
    clock = FakeClock()
    reads = FirstReads(clock)
    source = SlowDirectory(tmp_path, clock)
    open_checkpoint(reads.watch(source), Settings(), threads=1)
    cost = reads.cost()
    assert cost.latency_reads == 5  # the index and four headers
    assert cost.latency_s == pytest.approx(0.04, abs=0.001)
    assert (cost.bytes_per_s, cost.rate_reads) == (PathCost().bytes_per_s, 0)


def test_a_watched_source_is_the_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    source = LocalSource(tmp_path)
    watched = FirstReads(FakeClock()).watch(source)
    assert isinstance(watched, ObjectSource)
    assert watched.root == source.root
    assert watched.list() == source.list()
    object_id = watched.stat("a")
    assert object_id == source.stat("a")
    assert watched.read(object_id) == b"0123456789"
    assert watched.read(object_id, ByteRange(2, 4)) == b"23"
    assert watched.stored_checksum(object_id) == source.stored_checksum(object_id)
    assert watched.describe() == source.describe()
    buffer = bytearray(3)
    receiver = watched.open_receiver()
    receiver.receive(object_id, ByteRange(7, 10), memoryview(buffer))
    receiver.close()
    assert buffer == b"789"
    assert watched.put_if_absent("b", b"new") is True
    watched.close()
    assert source.read(source.stat("b")) == b"new"


def test_a_read_that_failed_says_nothing(tmp_path: Path) -> None:
    reads = FirstReads(FakeClock())
    watched = reads.watch(LocalSource(tmp_path))
    for _ in range(3):
        with pytest.raises(ObjectChangedError, match="deleted"):
            watched.read(ObjectId((tmp_path / "missing").as_uri(), None, 5))
    assert reads.cost() == PathCost()


def test_a_load_says_which_gaps_it_read_over(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    session = load(directory, settings, Model(tensors))
    told = session.report.merge_gap
    assert LEAST_GAP_BYTES <= told["bytes"] <= MOST_GAP_BYTES
    assert told["latency_reads"] >= 0
    assert told["latency_s"] > 0
    assert (told["bytes_per_s"], told["rate_reads"]) == (PathCost().bytes_per_s, 0)


def test_a_gap_that_is_set_counts(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    settings = load_settings({"merge_gap_bytes": "3KiB", "progress": "off"}, {})
    with LoadSession([WeightSource(str(directory))], settings) as session:
        model = Model(tensors)
        session.load(model, model.load_weights)
    assert session.report.merge_gap["bytes"] == 3072
