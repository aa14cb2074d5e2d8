"""A device for tests: it records what is asked for, and does it only when it is told to.

Copies read their source when they are *done*, not when they are asked for. So bytes that were
overwritten too early arrive wrong, as they would on a real device. What is still to be read is
known too: `reads` says whether a piece of host memory is.

Its tensors are host tensors; whoever uses it sends targets on the host to it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fastload_common.staging.device import PinRefusedError

__all__ = ["FakeDevice", "FakeMark", "Operation"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that was asked for.

    Attributes:
        kind: ``copy``, ``rows``, ``spread`` or ``mark``.
        size_bytes: that it moves.
        reads: host memory that it reads: address of the first byte and behind the last one.
        work: does it.
    """

    kind: str
    size_bytes: int = 0
    reads: tuple[int, int] | None = None
    work: Callable[[], object] = field(default=lambda: None, repr=False, compare=False)


class FakeMark:
    """See `Mark`."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device = device
        self._number = number

    def is_done(self) -> bool:
        self._device.check()
        return self._device.done_count >= self._number

    def wait(self) -> None:
        self._device.assert_current()
        self._device.do(self._number - self._device.done_count)
        self._device.check()


class FakeDevice:
    """See `Device`.

    Args:
        copies_rows, is_integrated: see `Device`.
        refuses: whether to refuse memory: told whether it is mapped for reading only.
        pinned_limit_bytes: refuse more than that.

    Attributes:
        operations: all that was asked for, in order.
        done_count: how many of them are done, from the first on.
        pinned: sizes of pinned memory by address.
        peak_pinned_bytes: the most at one time.
        memory_bytes: the most that `memory` gave between two calls of `finish`.
        fails_at: the number of the operation that fails, from 1 on; None: none does.
        calls: names of calls that are no operations.
    """

    name = "fake:0"

    def __init__(
        self,
        *,
        copies_rows: bool = True,
        is_integrated: bool = False,
        refuses: Callable[[bool], bool] = lambda read_only: False,
        pinned_limit_bytes: int | None = None,
    ) -> None:
        self.copies_rows = copies_rows
        self.is_integrated = is_integrated
        self._refuses = refuses
        self._limit_bytes = pinned_limit_bytes
        self._waiting: deque[Operation] = deque()
        self._lock = threading.RLock()
        self._threads = threading.local()
        self._owner = threading.get_ident()
        self._error: RuntimeError | None = None
        self._held_bytes = 0
        self.operations: list[Operation] = []
        self.done_count = 0
        self.pinned: dict[int, int] = {}
        self.peak_pinned_bytes = 0
        self.memory_bytes = 0
        self.fails_at: int | None = None
        self.calls: list[str] = []

    # -- what tests use ---------------------------------------------------------------------

    def do(self, count: int | None = None) -> None:
        """Do the oldest of what was asked for; all of it by default."""
        with self._lock:
            left = len(self._waiting) if count is None else count
            while left > 0 and self._waiting:
                operation = self._waiting[0]
                if self.done_count + 1 == self.fails_at:
                    self._error = RuntimeError("an illegal memory access was encountered")
                if self._error is None:
                    operation.work()
                self._waiting.popleft()
                self.done_count += 1
                left -= 1

    def check(self) -> None:
        """Raise what failed; like a real device's, an error stays."""
        if self._error is not None:
            raise self._error

    def reads(self, address: int, size_bytes: int) -> bool:
        """Whether something that was asked for has still to read this memory."""
        with self._lock:
            return any(
                operation.reads is not None
                and operation.reads[0] < address + size_bytes
                and address < operation.reads[1]
                for operation in self._waiting
            )

    def count(self, kind: str) -> int:
        """How many operations of a kind were asked for."""
        return sum(operation.kind == kind for operation in self.operations)

    def moved_bytes(self, *kinds: str) -> int:
        """Bytes of operations of these kinds."""
        return sum(one.size_bytes for one in self.operations if one.kind in kinds)

    def is_pinned(self, address: int, size_bytes: int) -> bool:
        """Whether this memory lies in one pinned block."""
        with self._lock:
            return any(
                start <= address and address + size_bytes <= start + length
                for start, length in self.pinned.items()
            )

    def assert_current(self) -> None:
        """Other threads than the one that made it must have said which device they work with."""
        inside = getattr(self._threads, "depth", 0) > 0
        assert inside or threading.get_ident() == self._owner, "a thread on no device"

    # -- Device -----------------------------------------------------------------------------

    @contextmanager
    def current(self) -> Iterator[None]:
        self._threads.depth = getattr(self._threads, "depth", 0) + 1
        try:
            yield
        finally:
            self._threads.depth -= 1

    def begin(self) -> None:
        self.calls.append("begin")

    def register(self, address: int, size_bytes: int, *, read_only: bool) -> None:
        self.assert_current()
        with self._lock:
            pinned_bytes = sum(self.pinned.values()) + size_bytes
            if self._refuses(read_only) or pinned_bytes > (self._limit_bytes or pinned_bytes):
                raise PinRefusedError("refused by the test")
            for start, length in self.pinned.items():
                assert address >= start + length or start >= address + size_bytes, "pinned twice"
            self.pinned[address] = size_bytes
            self.peak_pinned_bytes = max(self.peak_pinned_bytes, pinned_bytes)

    def unregister(self, address: int) -> None:
        with self._lock:
            assert not self.reads(address, self.pinned[address]), "unpinned while it is read"
            del self.pinned[address]

    def memory(self, size_bytes: int) -> torch.Tensor:
        self._held_bytes += size_bytes
        self.memory_bytes = max(self.memory_bytes, self._held_bytes)
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.shape == source.shape
        self._ask("copy", target, source, _span(source))

    def copy_rows(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.copies_rows
        assert target.dtype == source.dtype
        assert target.dim() == source.dim() == 2
        assert target.shape == source.shape
        assert target.stride(1) == source.stride(1) == 1
        assert min(target.stride(0), source.stride(0)) >= source.shape[1]
        start, end = _span(source)
        assert self.is_pinned(start, end - start), "rows of pageable memory"
        self._ask("rows", target, source, (start, end))

    def spread(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        targets, sources = list(targets), list(sources)

        def work() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        self._put(Operation("spread", sum(one.nbytes for one in sources), None, work))

    def mark(self) -> FakeMark:
        return FakeMark(self, self._put(Operation("mark")))

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.check()

    def finish(self) -> None:
        self.calls.append("finish")
        self._held_bytes = 0
        self.do()
        self.check()

    def _ask(
        self, kind: str, target: torch.Tensor, source: torch.Tensor, reads: tuple[int, int]
    ) -> None:
        self._put(Operation(kind, source.nbytes, reads, lambda: target.copy_(source)))

    def _put(self, operation: Operation) -> int:
        with self._lock:
            self.check()
            self.operations.append(operation)
            self._waiting.append(operation)
            return len(self.operations)


def _span(source: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one."""
    last = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
    start = source.data_ptr()
    return start, start + (last + 1) * source.element_size()
