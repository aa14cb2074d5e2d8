"""Digests and CRCs of what streams by, computed in a thread of their own.

So that a layer is not slower than the slowest of inflating, hashing and writing; all of them
release the interpreter's lock.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from types import TracebackType
from typing import Protocol

from fastload_common.checksums.algorithms import Checksum, crc_function
from fastload_common.checksums.combine import combine
from fastload_common.errors import ChecksumMismatchError, SourceError

__all__ = ["Crc", "Digest", "Sha", "Summing"]

_DEPTH = 2  # pieces on the way
_ALGORITHMS = {"sha256": 64, "sha512": 128}


class Summing(Protocol):
    """Takes bytes, and says at the end whether they were the right ones."""

    def update(self, data: bytes, /) -> None: ...

    def check(self, what: str) -> None:
        """Compare.

        Args:
            what: names the bytes in the error.

        Raises:
            ChecksumMismatchError: they were not.
        """
        ...


class Sha:
    """A digest ``algorithm:hex``.

    Raises:
        SourceError: of an algorithm that is not known.
    """

    def __init__(self, expected: str) -> None:
        algorithm, _, value = expected.partition(":")
        if _ALGORITHMS.get(algorithm) != len(value):
            raise SourceError(f"not a digest that is known: {expected[:100]!r}")
        self._expected = expected
        self._algorithm = algorithm
        self._hash = hashlib.new(algorithm)

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def check(self, what: str) -> None:
        """See `Summing.check`."""
        found = f"{self._algorithm}:{self._hash.hexdigest()}"
        if found != self._expected:
            raise ChecksumMismatchError(
                f"{what} is not what its digest says",
                hint="pull again; if it happens again, the registry or a proxy serves other bytes",
                expected=self._expected,
                computed=found,
            )


class Crc:
    """A CRC that a store keeps.

    Raises:
        ConfigError: a package is missing.
    """

    def __init__(self, expected: Checksum) -> None:
        self._expected = expected
        self._function = crc_function(expected.algorithm)
        self._value = 0

    def update(self, data: bytes) -> None:
        algorithm = self._expected.algorithm
        self._value = combine(algorithm, self._value, self._function(data), len(data))

    def check(self, what: str) -> None:
        """See `Summing.check`."""
        if self._value != self._expected.value:
            raise ChecksumMismatchError(
                f"{what} is not what was stored",
                hint="pull again; if it happens again, the object was damaged after its upload",
                algorithm=self._expected.algorithm.name,
                expected=str(self._expected),
                computed=self._expected.algorithm.show(self._value),
            )


class Digest:
    """Feeds a `Summing` in a thread; use it as a context.

    Args:
        summing: None: nothing is computed.
    """

    def __init__(self, summing: Summing | None) -> None:
        self._summing = summing
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_DEPTH)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Digest:
        if self._summing is not None:
            self._thread = threading.Thread(target=self._run, name="fastload-digest", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def update(self, data: bytes) -> None:
        """Take a piece; waits while too many are on the way."""
        if self._thread is not None and data:
            self._pieces.put(data)

    def check(self, what: str) -> bool:
        """Compare after the last piece; whether there was anything to compare with.

        Raises:
            ChecksumMismatchError: see `Summing.check`.
        """
        self._end()
        if self._error is not None:
            raise self._error
        if self._summing is not None:
            self._summing.check(what)
        return self._summing is not None

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._pieces.put(None)
            thread.join()

    def _run(self) -> None:
        assert self._summing is not None
        while (data := self._pieces.get()) is not None:
            if self._error is None:
                try:
                    self._summing.update(data)
                except BaseException as error:  # noqa: BLE001 - raised again by `check`
                    self._error = error
