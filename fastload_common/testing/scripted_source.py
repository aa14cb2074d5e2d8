"""A source in memory whose faults are scripted, for exact tests of what stands above it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload_common.checksums.algorithms import Checksum
from fastload_common.errors import ObjectMissingError, SourceError, SourceUnavailableError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, Receipt, SourceDescription

__all__ = ["Fault", "Request", "ScriptedSource"]

# A stall must end even if nobody aborts it; then the test fails by its error.
_STALL_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What one attempt does instead of success.

    Attributes:
        error: the type that is raised, or a whole exception.
        good_bytes: bytes that are right before it (at most what was asked).
        retry_after_s: what the server asks the client to wait.
        stalls: says nothing until it is aborted.
        claimed_bytes: `SourceError.received_bytes`, where it shall differ from good_bytes.
    """

    error: type[SourceError] | BaseException = SourceUnavailableError
    good_bytes: int = 0
    retry_after_s: float | None = None
    stalls: bool = False
    claimed_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt, as the source saw it; ``receiver`` counts connections from 0."""

    object_id: ObjectId
    byte_range: ByteRange
    receiver: int


class ScriptedSource:
    """Implements `fastload_common.source.base.ObjectSource`.

    Args:
        objects: contents by key.
        faults: by key and *end* of the range (the same in all attempts of a chunk), what its
            first, second, ... attempt does; later attempts succeed.
        gate: if given, each request waits until it is set (or is aborted).
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        faults: Mapping[tuple[str, int], Sequence[Fault]] | None = None,
        *,
        root: str = "s3://bucket/model",
        gate: threading.Event | None = None,
    ) -> None:
        self._objects = dict(objects)
        self._faults = {spot: list(script) for spot, script in (faults or {}).items()}
        self._root = root
        self._gate = gate
        self._lock = threading.Lock()
        self._in_flight = 0
        self.requests: list[Request] = []
        self.peak_in_flight = 0
        self.receivers_opened = 0
        self.receivers_open = 0
        self.request_began = threading.Semaphore(0)

    @property
    def root(self) -> str:
        return self._root

    def object_id(self, key: str) -> ObjectId:
        return ObjectId(f"{self._root}/{key}", f'"{key}"', len(self._objects[key]))

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        keys = sorted(key for key in self._objects if recursive or "/" not in key)
        return [ListedObject(key, self.object_id(key)) for key in keys]

    def stat(self, key: str) -> ObjectId:
        if key not in self._objects:
            raise ObjectMissingError(f"no object {self._root}/{key}")
        return self.object_id(key)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        data = self._objects[self._key(object_id)]
        return data if byte_range is None else data[byte_range.start : byte_range.end]

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            return self._objects.setdefault(key, data) is data

    def open_receiver(self) -> ScriptedReceiver:
        with self._lock:
            self.receivers_opened += 1
            self.receivers_open += 1
            return ScriptedReceiver(self, self.receivers_opened - 1)

    def describe(self) -> SourceDescription:
        return SourceDescription("scripted", self._root)

    def close(self) -> None:
        pass

    def _key(self, object_id: ObjectId) -> str:
        return object_id.uri.removeprefix(self._root + "/")

    def _begin(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            self._in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
            script = self._faults.get((self._key(request.object_id), request.byte_range.end))
        self.request_began.release()
        return script.pop(0) if script else None

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def _closed(self) -> None:
        with self._lock:
            self.receivers_open -= 1


class ScriptedReceiver:
    """Implements `fastload_common.source.base.Receiver`."""

    def __init__(self, source: ScriptedSource, number: int) -> None:
        self._source = source
        self._number = number
        self._is_new = True
        self._aborted = threading.Event()

    def receive(self, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview) -> Receipt:
        fault = self._source._begin(Request(object_id, byte_range, self._number))
        try:
            return self._answer(fault, object_id, byte_range, buffer)
        finally:
            self._source._end()

    def _answer(
        self, fault: Fault | None, object_id: ObjectId, byte_range: ByteRange, buffer: memoryview
    ) -> Receipt:
        if len(buffer) != byte_range.size_bytes or not buffer or buffer.readonly:
            raise ValueError(f"a bad buffer of {len(buffer)} bytes for {byte_range}")
        self._wait_for_gate()
        data = self._source.read(object_id, byte_range)
        good_bytes = len(data) if fault is None else min(fault.good_bytes, len(data))
        buffer[:good_bytes] = data[:good_bytes]
        if fault is not None:
            if fault.stalls:
                self._aborted.wait(_STALL_LIMIT_S)
            raise _error_of(fault, byte_range, good_bytes)
        is_new, self._is_new = self._is_new, False
        return Receipt(len(data), first_byte_s=0.01, total_s=0.02, new_connection=is_new)

    def _wait_for_gate(self) -> None:
        gate = self._source._gate
        while gate is not None and not gate.wait(0.005):
            if self._aborted.is_set():
                raise SourceUnavailableError("aborted")

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._source._closed()


def _error_of(fault: Fault, byte_range: ByteRange, good_bytes: int) -> BaseException:
    if isinstance(fault.error, BaseException):
        return fault.error
    fields: dict[str, Any] = {"range": str(byte_range), "retry_after_s": fault.retry_after_s}
    error = fault.error("a scripted fault", **fields)
    error.received_bytes = good_bytes if fault.claimed_bytes is None else fault.claimed_bytes
    return error
