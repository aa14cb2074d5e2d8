"""How much of a body has come, for one thread that receives it and another that looks."""

from __future__ import annotations

import socket
from collections.abc import Callable

from fastload_common.source.http_socket import tcp_received_bytes

__all__ = ["Progress"]


class Progress:
    """Of one body; written by the thread that receives it.

    Attributes:
        received_bytes: what is in the caller's memory.
        in_flight_bytes: what one call of the system waits for, if it counts what comes.
    """

    def __init__(self) -> None:
        self.received_bytes = 0
        self.in_flight_bytes = 0

    def so_far_bytes(
        self, connected: socket.socket | None, consumed_bytes: Callable[[], int]
    ) -> int:
        """What has come, the system's buffers included. For any thread.

        Args:
            connected: the socket it comes over.
            consumed_bytes: how much that socket has given in all.
        """
        in_flight_bytes = self.in_flight_bytes
        if connected is None or not in_flight_bytes:
            return self.received_bytes
        arrived_bytes = tcp_received_bytes(connected)
        # In this order: the receiving thread sets them in the other one.
        received_bytes = self.received_bytes
        waiting_bytes = max(0, arrived_bytes - consumed_bytes())
        return received_bytes + min(waiting_bytes, in_flight_bytes)
