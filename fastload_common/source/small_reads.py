"""Small reads over kept connections, each with retries for the missing bytes only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from fastload_common.config import Settings
from fastload_common.errors import SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import Receiver
from fastload_common.source.retries import SmallCalls

__all__ = ["SmallReads"]


class SmallReads:
    """What `ObjectSource.read` needs of a source that is read over HTTP. For any thread.

    Args:
        small_calls: the patience of the source's small calls.
        open_receiver: makes a receiver with these settings' timeouts.
    """

    def __init__(
        self, small_calls: SmallCalls, open_receiver: Callable[[Settings], Receiver]
    ) -> None:
        self._small_calls = small_calls
        self._open_receiver = open_receiver
        self._idle: dict[int, deque[Receiver]] = {}

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        """See `ObjectSource.read`."""
        byte_range = byte_range or ByteRange(0, object_id.size_bytes)
        data = bytearray(byte_range.size_bytes)
        if data:
            self._read_into(object_id, byte_range, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close what is kept; later reads open anew."""
        idle = self._idle.pop(os.getpid(), None)
        while idle:
            idle.pop().close()

    def _read_into(self, object_id: ObjectId, byte_range: ByteRange, view: memoryview) -> None:
        done_bytes = 0
        attempts = self._small_calls.begin(f"read {object_id.uri}")
        while True:
            # By process: a connection of the parent is of no use after a fork.
            idle = self._idle.setdefault(os.getpid(), deque())
            try:
                receiver = idle.pop()
            except IndexError:
                connect_s, read_s = self._small_calls.timeouts_s()
                receiver = self._open_receiver(
                    replace(
                        self._small_calls.settings,
                        connect_timeout_s=connect_s,
                        read_timeout_s=read_s,
                    )
                )
            missing = ByteRange(byte_range.start + done_bytes, byte_range.end)
            try:
                receiver.receive(object_id, missing, view[done_bytes:])
            except SourceError as error:
                receiver.close()
                done_bytes += error.received_bytes
                error.received_bytes = 0
                if error.retryable and done_bytes == byte_range.size_bytes:
                    return  # only the end of the reply was not as it should be
                attempts.wait_or_raise(error)
            except BaseException:
                receiver.close()
                raise
            else:
                self._small_calls.answered = True
                idle.append(receiver)
                return
