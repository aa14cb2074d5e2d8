"""A process forked from a rank holds copies of its sockets: the rank's end is seen all the same."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from fastload_common.clock import SystemClock
from fastload_common.errors import PeerError
from fastload_common.exchange.card import Card
from fastload_common.exchange.meeting import Met
from fastload_common.exchange.peers import Peers
from fastload_common.exchange.processes import close_in_children


def nothing(*args: int) -> None:
    pass


def test_a_process_that_ends_is_seen_though_its_socket_is_held_open() -> None:
    """The other rank's socket is kept by somebody: here by this process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0fastload-test-" + os.urandom(8).hex().encode())
    listener.listen()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(listener.getsockname())
        # Its copy goes to this process: held open there whatever becomes of the child.
        socket.send_fds(peer, [b"x"], [peer.fileno()])
        os.read(read, 1)  # until this process ends it, or ends
        os._exit(0)
    line = listener.accept()[0]
    _, copies, _, _ = socket.recv_fds(line, 1, 1)
    peers = Peers(
        Met(Card.make(0), ((Card.make(1), line),)),
        SystemClock(),
        on_filled=nothing,
        on_taken=nothing,
        deadline_s=SystemClock().monotonic_s() + 10,
        limit_s=10,
    )
    try:
        peers.check()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PeerError, match=r"rank 1 .* without a word"):
            peers.wait(lambda: False, list, "nothing")
    finally:
        os.waitpid(pid, 0)
        peers.close()
        listener.close()
        for fd in (read, write, *copies):
            os.close(fd)
    assert not [t for t in threading.enumerate() if t.name == "fastload-peers"]


def test_a_forked_process_has_no_copies() -> None:
    ours, theirs = socket.socketpair()
    close_in_children([ours])
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        theirs.settimeout(10)
        ours.close()
        assert theirs.recv(1) == b""  # though the child still runs
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(pid, 0)
        theirs.close()
