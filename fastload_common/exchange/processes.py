"""The processes behind sockets: whether one has ended, and what a fork must not keep open.

A socket ends when its last copy is closed. A process that was forked from a rank holds copies, so
the rank's end is not seen by its socket: its process is watched beside it, and a child closes
the copies at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterable

__all__ = ["close_in_children", "watch"]

_CREDENTIALS = struct.Struct("3i")
_to_close: weakref.WeakSet[socket.socket] | None = None


def watch(peer: socket.socket) -> int | None:
    """A descriptor that is readable once the process at the other side has ended.

    The caller owns it. None where the system has none: other process namespaces, old kernels.
    """
    try:
        data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return os.pidfd_open(_CREDENTIALS.unpack(data)[0])
    except (OSError, AttributeError):
        return None


def close_in_children(peers: Iterable[socket.socket]) -> None:
    """From now on, processes that are forked from this one have no copies of these sockets."""
    global _to_close
    if _to_close is None:
        _to_close = weakref.WeakSet()
        os.register_at_fork(after_in_child=_close)
    _to_close.update(peers)


def _close() -> None:
    with contextlib.suppress(Exception):
        for peer in list(_to_close or ()):
            peer.close()
