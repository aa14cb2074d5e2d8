"""Small reads over kept connections, each with retries for the missing bytes only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from fastload_common.config import Settings
from fastload_common.errors import RangeMismatchError, SourceError, SourceUnavailableError
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
        done_bytes, most_bytes = 0, 0
        has_ranges = True
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
                if done_bytes and isinstance(error, RangeMismatchError):
                    # It has given the beginning of the whole, and gives no rest: all of it anew.
                    done_bytes, has_ranges = 0, False
                    continue
                done_bytes += error.received_bytes
                most_bytes = max(most_bytes, done_bytes)
                error.received_bytes = 0
                if not has_ranges and done_bytes < byte_range.size_bytes:
                    done_bytes = 0
                    error = _cut_error(error, object_id, most_bytes)
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


def _cut_error(error: SourceError, object_id: ObjectId, most_bytes: int) -> SourceError:
    """What a failed reading of the whole means where its rest cannot be asked for."""
    if not error.retryable:
        return error
    told = SourceUnavailableError(
        f"the reply ended after at most {most_bytes} of {object_id.size_bytes} bytes, and the "
        f"endpoint does not honour Range, so that the rest could not be asked for: {error.what}",
        hint="go to the registry or store itself, not a gateway or proxy before it; an artifact of "
        "a registry can be had by `fastload pull` as well",
        **error.fields,
    )
    told.__cause__ = error
    return told
