"""Frames over a Unix socket: whole in any pieces, with descriptors, and never waiting."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload_common.exchange.frames import Frame, Inbox, Outbox

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    yield one, other
    one.close()
    other.close()


def receive_all(inbox: Inbox) -> list[Frame]:
    frames: list[Frame] = []
    while found := inbox.receive():
        frames += found
    return frames


FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=12)


@given(FRAMES, st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_frames_are_whole_in_whatever_pieces_they_come(
    frames: list[Frame], cuts: list[int]
) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        outbox = Outbox(one)
        for kind, payload in frames:
            assert outbox.send(kind, payload)
        one.shutdown(socket.SHUT_WR)
        sent = b"".join(iter(lambda: other.recv(1 << 16), b""))
        inbox = Inbox(other)
        found: list[Frame] = []
        position, turn = 0, 0
        while position < len(sent):
            size = cuts[turn % len(cuts)]
            found += inbox.take(sent[position : position + size])
            position, turn = position + size, turn + 1
        assert found == frames


def test_a_frame_larger_than_the_socket_goes_out_as_it_is_read(pair: Pair) -> None:
    one, other = pair
    outbox, inbox = Outbox(one), Inbox(other)
    payload = os.urandom(5 << 20)
    assert not outbox.send(1, payload)
    assert not outbox.send(2, b"behind")
    found: list[Frame] = []
    while len(found) < 2:
        found += inbox.receive() or []
        outbox.flush()
    assert outbox.is_empty
    assert found == [(1, payload), (2, b"behind")]


def test_a_descriptor_comes_with_its_frame_and_is_not_the_senders(pair: Pair) -> None:
    one, other = pair
    outbox, inbox = Outbox(one), Inbox(other)
    fd = os.memfd_create("test")
    os.write(fd, b"words")
    outbox.send(1, b"before")
    outbox.send(2, b"with", fd)
    outbox.send(3, b"after")
    os.close(fd)
    assert receive_all(inbox) == [(1, b"before"), (2, b"with"), (3, b"after")]
    (received,) = inbox.fds
    assert os.pread(received, 5, 0) == b"words"
    assert not os.get_inheritable(received)
    inbox.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(received)


def test_to_one_that_has_gone_nothing_is_sent_and_nothing_raised(pair: Pair) -> None:
    one, other = pair
    outbox = Outbox(one)
    other.close()
    fd = os.memfd_create("test")
    before = len(os.listdir("/proc/self/fd"))
    assert outbox.send(1, b"x")
    assert outbox.send(2, b"x", fd)
    assert outbox.is_empty
    assert len(os.listdir("/proc/self/fd")) == before  # no duplicate is left
    os.close(fd)


def test_what_was_said_before_an_end_is_heard(pair: Pair) -> None:
    one, other = pair
    Outbox(other).send(9, b"not read by the one that goes")
    Outbox(one).send(1, b"last words")
    one.close()  # with unread data: the other side's socket is reset
    inbox = Inbox(other)
    assert inbox.receive() == [(1, b"last words")]
    assert inbox.receive() is None


def test_a_length_that_is_none_is_refused(pair: Pair) -> None:
    one, other = pair
    one.send(b"\x01\xff\xff\xff\xff")
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        Inbox(other).receive()


def test_closing_drops_what_was_not_sent_and_its_descriptors(pair: Pair) -> None:
    one, _ = pair
    outbox = Outbox(one)
    fd = os.memfd_create("test")
    before = len(os.listdir("/proc/self/fd"))
    outbox.send(1, bytes(4 << 20))
    outbox.send(2, b"", fd)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    outbox.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert outbox.send(3, b"too late")
    assert outbox.is_empty
    os.close(fd)
