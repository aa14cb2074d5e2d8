"""Addresses to connect to, and how a plain socket waits. Only the standard library."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

__all__ = ["addresses", "block_with_timeout"]


def addresses(host: str, port: int) -> list[Any]:
    """What the name stands for, as `socket.getaddrinfo` gives it.

    Each call begins at another of the addresses, so that connections spread over them. The families
    stay in the system's order: one of them may lead nowhere.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ordered: list[Any] = []
    for family in dict.fromkeys(one[0] for one in found):
        same = [one for one in found if one[0] == family]
        start = int.from_bytes(os.urandom(2), "big") % len(same)
        ordered += same[start:] + same[:start]
    return ordered


def block_with_timeout(connected: socket.socket, timeout_s: float) -> None:
    """Let the kernel time sends and receives, and the socket block.

    So MSG_WAITALL works; Python's own timeout would poll before each receive and get only what has
    arrived.
    """
    seconds = int(timeout_s)
    timeval = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
