"""What every `ObjectSource` must do. A backend's tests subclass `SourceSuite` and give a store.

class TestLocal(SourceSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> StoreUnderTest: ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload_common.checksums.algorithms import crc_function
from fastload_common.errors import (
    ObjectChangedError,
    ObjectMissingError,
    SourceUnavailableError,
)
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ObjectSource, Receiver

__all__ = ["ODD_KEYS", "SourceSuite", "StoreUnderTest"]

ODD_KEYS = (
    "a b",
    "plus+sign",
    "per%cent",
    "per%25cent",
    "ünïcode-模型",
    "question?mark",
    "hash#tag",
    "tilde~",
    "semi;colon&and=equals",
    "quote'\"quote",
    "star*[x]{y}",
    ".hidden",
    "a..b",
    "dir.with.dots/.hidden/..name",
)


class StoreUnderTest(Protocol):
    """A source, and a way to change what is behind it without asking the source."""

    @property
    def source(self) -> ObjectSource: ...

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object below the source's root."""

    def write_beside(self, data: bytes) -> None:
        """Create an object whose name starts with the root's name but is not below the root."""

    def delete(self, key: str) -> None: ...


class SourceSuite:
    """Subclass and override the fixture `store` with an empty one for each test."""

    @pytest.fixture
    def store(self) -> StoreUnderTest:
        """The store to test."""
        raise NotImplementedError

    # list and stat

    def test_satisfies_the_protocol(self, store: StoreUnderTest) -> None:
        assert isinstance(store.source, ObjectSource)
        receiver = store.source.open_receiver()
        assert isinstance(receiver, Receiver)
        receiver.close()
        assert not store.source.root.endswith("/")

    def test_list_is_sorted_and_relative_to_the_root(self, store: StoreUnderTest) -> None:
        for key in ("z", "a/b/c", "a-", "model-1.safetensors"):
            store.write(key, key.encode())
        store.write_beside(b"not ours")
        rows = store.source.list()
        assert [row.key for row in rows] == ["a-", "a/b/c", "model-1.safetensors", "z"]
        assert [row.object_id.size_bytes for row in rows] == [2, 5, 19, 1]
        assert all(row.object_id.etag for row in rows)
        assert all(row.object_id.uri.startswith(store.source.root + "/") for row in rows)

    def test_list_not_recursive_has_the_top_level_only(self, store: StoreUnderTest) -> None:
        for key in ("z", "a/b/c", "a/d"):
            store.write(key, b"x")
        assert [row.key for row in store.source.list(recursive=False)] == ["z"]

    def test_stat_names_the_state_that_list_names(self, store: StoreUnderTest) -> None:
        store.write("dir/key", b"0123")
        (row,) = store.source.list()
        assert store.source.stat("dir/key") == row.object_id

    @pytest.mark.parametrize("key", ["nothing", "dir", "dir/nothing", "file/below"])
    def test_stat_of_nothing_names_it(self, store: StoreUnderTest, key: str) -> None:
        store.write("dir/key", b"0123")
        store.write("file", b"0123")
        with pytest.raises(ObjectMissingError, match=key.rpartition("/")[2]):
            store.source.stat(key)

    # read and receive

    def test_reads_the_whole_and_parts(self, store: StoreUnderTest) -> None:
        store.write("key", b"0123456789")
        object_id = store.source.stat("key")
        assert store.source.read(object_id) == b"0123456789"
        assert store.source.read(object_id, ByteRange(0, 10)) == b"0123456789"
        assert store.source.read(object_id, ByteRange(3, 7)) == b"3456"
        assert store.source.read(object_id, ByteRange(9, 10)) == b"9"
        assert store.source.read(object_id, ByteRange(4, 4)) == b""

    def test_empty_object(self, store: StoreUnderTest) -> None:
        store.write("empty", b"")
        object_id = store.source.stat("empty")
        assert object_id.size_bytes == 0
        assert store.source.read(object_id) == b""
        assert [row.key for row in store.source.list()] == ["empty"]

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys(self, store: StoreUnderTest, key: str) -> None:
        store.write(key, key.encode())
        (row,) = store.source.list()
        assert row.key == key
        assert store.source.stat(key) == row.object_id
        assert store.source.read(row.object_id) == key.encode()

    def test_receive_fills_its_part_of_the_buffer_only(self, store: StoreUnderTest) -> None:
        store.write("key", bytes(range(256)) * 40)
        object_id = store.source.stat("key")
        whole = bytearray(b"\xff" * 300)
        receiver = store.source.open_receiver()
        for start, end in ((0, 100), (10_000, 10_240), (77, 78)):
            size_bytes = end - start
            view = memoryview(whole)[30 : 30 + size_bytes]
            receipt = receiver.receive(object_id, ByteRange(start, end), view)
            assert receipt.size_bytes == size_bytes
            assert 0 <= receipt.first_byte_s <= receipt.total_s
            assert bytes(view) == (bytes(range(256)) * 40)[start:end]
            assert whole[:30] == b"\xff" * 30
            assert whole[30 + size_bytes :] == b"\xff" * (270 - size_bytes)
            whole[:] = b"\xff" * 300
        receiver.close()

    def test_a_receiver_keeps_what_it_opened(self, store: StoreUnderTest) -> None:
        store.write("key", b"0123456789")
        object_id = store.source.stat("key")
        receiver = store.source.open_receiver()
        buffer = memoryview(bytearray(2))
        new = [receiver.receive(object_id, ByteRange(i, i + 2), buffer) for i in range(3)]
        assert [receipt.new_connection for receipt in new] == [True, False, False]
        receiver.close()

    def test_any_sequence_of_ranges_gives_the_bytes(self, store: StoreUnderTest) -> None:
        data = bytes((i * 7 + i // 251) % 256 for i in range(20_000))
        store.write("key", data)
        object_id = store.source.stat("key")
        receiver = store.source.open_receiver()

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(_ranges(len(data)), min_size=1, max_size=5))
        def check(ranges: list[ByteRange]) -> None:
            for byte_range in ranges:
                buffer = bytearray(byte_range.size_bytes)
                receiver.receive(object_id, byte_range, memoryview(buffer))
                assert buffer == data[byte_range.start : byte_range.end]
                assert store.source.read(object_id, byte_range) == buffer

        check()
        receiver.close()

    def test_receivers_work_side_by_side(self, store: StoreUnderTest) -> None:
        data = bytes(i % 251 for i in range(100_000))
        store.write("key", data)
        object_id = store.source.stat("key")
        wrong: list[object] = []

        def work(first: int) -> None:
            receiver = store.source.open_receiver()
            try:
                for start in range(first, 90_000, 9_000):
                    buffer = bytearray(5_000)
                    receiver.receive(object_id, ByteRange(start, start + 5_000), memoryview(buffer))
                    if buffer != data[start : start + 5_000]:
                        wrong.append(start)
            except Exception as error:  # noqa: BLE001  (shown by the assertion)
                wrong.append(error)
            finally:
                receiver.close()

        _together([lambda first=first: work(first) for first in range(6)])  # type: ignore[misc]
        assert not wrong

    # change

    @pytest.mark.parametrize("replacement", [b"9876543210", b"shorter", b"very much longer"])
    def test_replaced_object_is_never_read(self, store: StoreUnderTest, replacement: bytes) -> None:
        store.write("key", b"0123456789")
        object_id = store.source.stat("key")
        store.write("key", replacement)
        with pytest.raises(ObjectChangedError, match="key"):
            store.source.read(object_id)
        self._expect_changed(store, object_id)
        assert store.source.read(store.source.stat("key")) == replacement

    def test_deleted_object_has_changed(self, store: StoreUnderTest) -> None:
        store.write("key", b"0123456789")
        object_id = store.source.stat("key")
        store.delete("key")
        self._expect_changed(store, object_id)
        with pytest.raises(ObjectMissingError):
            store.source.stat("key")

    def _expect_changed(self, store: StoreUnderTest, object_id: ObjectId) -> None:
        receiver = store.source.open_receiver()
        with pytest.raises(ObjectChangedError) as caught:
            receiver.receive(object_id, ByteRange(2, 5), memoryview(bytearray(3)))
        assert caught.value.received_bytes == 0
        assert not caught.value.retryable
        assert caught.value.fields["uri"] == object_id.uri
        receiver.close()

    # checksum

    def test_stored_checksum_is_that_of_the_bytes_or_none(self, store: StoreUnderTest) -> None:
        store.write("key", b"0123456789")
        object_id = store.source.stat("key")
        stored = store.source.stored_checksum(object_id)
        if stored is not None:
            assert stored.value == crc_function(stored.algorithm)(b"0123456789")
            store.write("key", b"9876543210")
            with pytest.raises(ObjectChangedError, match="key"):
                store.source.stored_checksum(object_id)

    # put

    def test_put_if_absent_creates_once(self, store: StoreUnderTest) -> None:
        assert store.source.put_if_absent("dir/sub/key", b"first")
        assert not store.source.put_if_absent("dir/sub/key", b"second")
        assert store.source.read(store.source.stat("dir/sub/key")) == b"first"
        assert [row.key for row in store.source.list()] == ["dir/sub/key"]

    def test_put_if_absent_has_one_winner(self, store: StoreUnderTest) -> None:
        created: list[tuple[bool, bytes]] = []

        def put(data: bytes) -> None:
            created.append((store.source.put_if_absent("key", data), data))

        names = [f"writer {i}".encode() for i in range(6)]
        _together([lambda name=name: put(name) for name in names])  # type: ignore[misc]
        winners = [data for won, data in created if won]
        assert len(created) == 6
        assert len(winners) == 1
        assert store.source.read(store.source.stat("key")) == winners[0]

    # ending

    def test_an_aborted_receiver_fails_for_good(self, store: StoreUnderTest) -> None:
        store.write("key", b"0123456789")
        object_id = store.source.stat("key")
        receiver = store.source.open_receiver()
        buffer = memoryview(bytearray(2))
        receiver.receive(object_id, ByteRange(0, 2), buffer)
        receiver.abort()
        for _ in range(2):
            with pytest.raises(SourceUnavailableError, match="abort"):
                receiver.receive(object_id, ByteRange(0, 2), buffer)
        receiver.close()
        receiver.close()

    def test_describes_itself(self, store: StoreUnderTest) -> None:
        description = store.source.describe()
        assert description.root == store.source.root
        assert all(isinstance(fact, str) for fact in description.facts.values())

    def test_usable_after_close(self, store: StoreUnderTest) -> None:
        store.write("key", b"0123456789")
        store.source.read(store.source.stat("key"))
        store.source.close()
        store.source.close()
        assert store.source.read(store.source.stat("key"), ByteRange(1, 2)) == b"1"


@st.composite
def _ranges(draw: st.DrawFn, size_bytes: int) -> ByteRange:
    start = draw(st.integers(0, size_bytes - 1))
    return ByteRange(start, draw(st.integers(start + 1, size_bytes)))


def _together(tasks: list[Callable[[], None]]) -> None:
    gate = threading.Barrier(len(tasks))

    def run(task: Callable[[], None]) -> None:
        gate.wait()
        task()

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
