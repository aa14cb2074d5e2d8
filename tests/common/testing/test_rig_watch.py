"""A hang-up is told once, of the right socket, and of no other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fastload_common.testing.rig.watch import HangUpWatch


@pytest.fixture
def watch() -> Iterator[HangUpWatch]:
    watch = HangUpWatch()
    yield watch
    watch.stop()


def test_a_hang_up_is_told(watch: HangUpWatch) -> None:
    ours, theirs = socket.socketpair()
    told = threading.Event()
    with ours:
        watch.add(ours.fileno(), told.set)
        theirs.send(b"data is no hang-up")
        watch.check(ours.fileno())
        assert not told.is_set()
        theirs.close()
        assert told.wait(20)
        watch.remove(ours.fileno())


def test_old_news_is_not_told_of_a_new_socket_with_the_same_number(watch: HangUpWatch) -> None:
    told: list[str] = []
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    watch.add(number, lambda: told.append("old"))
    watch.remove(number)
    ours.close()
    theirs.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert number in (ours.fileno(), theirs.fileno())
        watch.add(number, lambda: told.append("new"))
        watch.check(number)
        watch.remove(number)
    watch.check(number)
    assert told == []
