"""Several sources as one: which one is asked, and who closes what."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastload_common.errors import SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receiver
from fastload_common.source.composite import CompositeSource
from fastload_common.source.local import LocalSource


@pytest.fixture
def sources(tmp_path: Path) -> list[LocalSource]:
    """``a``, ``a/inner`` and ``a-b``, each with a file that holds its name."""
    found = []
    for name in ("a", "a/inner", "a-b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
        found.append(LocalSource(tmp_path / name))
    return found


def test_longest_root_wins(sources: list[LocalSource]) -> None:
    composite = CompositeSource(sources)
    for source in sources:
        assert composite.source_of(source.stat("key")) is source
    assert composite.source_of(sources[0].stat("inner/key")) is sources[1]


def test_reads_and_receives_through_each(sources: list[LocalSource]) -> None:
    composite = CompositeSource(reversed(sources))
    receiver = composite.open_receiver()
    assert isinstance(receiver, Receiver)
    for source, name in zip(sources, (b"a", b"a/inner", b"a-b"), strict=True):
        object_id = source.stat("key")
        assert composite.read(object_id) == name
        assert composite.read(object_id, ByteRange(0, 1)) == b"a"
        buffer = bytearray(len(name))
        receiver.receive(object_id, ByteRange(0, len(name)), memoryview(buffer))
        assert buffer == name
    receiver.close()


def test_object_of_no_source(sources: list[LocalSource]) -> None:
    with pytest.raises(ValueError, match="under none of"):
        CompositeSource(sources).read(ObjectId("s3://other/key", None, 1))


def test_receivers_are_opened_when_needed_and_aborted_together(
    sources: list[LocalSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = LocalSource.open_receiver

    def count(self: LocalSource) -> Receiver:
        opened.append(self.root)
        return real(self)

    monkeypatch.setattr(LocalSource, "open_receiver", count)
    receiver = CompositeSource(sources).open_receiver()
    assert opened == []
    buffer = memoryview(bytearray(1))
    for _ in range(2):
        receiver.receive(sources[0].stat("key"), ByteRange(0, 1), buffer)
    assert opened == [sources[0].root]
    receiver.abort()
    # Also the one that was not open yet.
    for source in sources[:2]:
        with pytest.raises(SourceUnavailableError):
            receiver.receive(source.stat("key"), ByteRange(0, 1), buffer)
    receiver.close()
