"""Threads that unpack layers and compare files, each as its bytes arrive."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastload_common.errors import ArchiveInvalidError, ChecksumMismatchError, PullError
from fastload_common.pull.digesting import Digest, Sha, Summing
from fastload_common.pull.inflate import HEAD_BYTES, open_inflater, window_bytes
from fastload_common.pull.layer import Unpacked, unpack_layer
from fastload_common.pull.layer_log import LogWriter
from fastload_common.pull.node_slots import NodeSlots
from fastload_common.pull.policy import Allowance, Special
from fastload_common.pull.records import FileItem, LayerItem
from fastload_common.pull.sizes import PullSizes
from fastload_common.pull.spool import Aborted, Spool
from fastload_common.pull.stage import UnpackedLayer

__all__ = ["Comparing", "Job", "Unpacking", "Windows", "Workers"]

_LOG_BUFFER_BYTES = 1 << 16


class Windows:
    """The memory for zstd windows, divided among the unpackers of a pull."""

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Have so much of it; waits for it. At most the total."""
        with self._changed:
            self._changed.wait_for(lambda: size_bytes <= self._free_bytes)
            self._free_bytes -= size_bytes
        try:
            yield
        finally:
            if size_bytes:
                _trim_heap()
            with self._changed:
                self._free_bytes += size_bytes
                self._changed.notify_all()


def _trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps it for the thread that had it: once windows come and go by turns, up to 16 MiB for
    each of 8 threads a CPU.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(slots=True)
class Unpacking:
    """One layer to be unpacked.

    Attributes:
        done: told when it is unpacked and verified.
    """

    item: LayerItem
    spool: Spool
    layer: UnpackedLayer
    special: Special
    is_image: bool
    allowance: Allowance
    windows: Windows
    done: Callable[[Unpacked], None]

    def run(self, sizes: PullSizes) -> None:
        """Unpack and verify.

        Raises:
            PullError: see `unpack_layer`.
            ChecksumMismatchError: the blob, or what is in it, is not what its digest says.
            Aborted: the pull has failed elsewhere.
        """
        item = self.item
        self.layer.begin()
        stored = Digest(Sha(item.digest) if item.digest else None)
        content = Digest(Sha(item.diff_id) if item.diff_id else None)
        try:
            with stored, content, self.spool.reading(sizes.piece_bytes) as read:
                unpacked = self._unpack(_Tee(read, stored), content, sizes)
                stored.check(item.object_id.uri)
                content.check(f"the content of {item.object_id.uri}")
        except BaseException:
            self.layer.discard()  # it begins anew in any case, and may have filled the disk
            raise
        self.layer.finish(dataclasses.asdict(unpacked))
        self.done(unpacked)

    def _unpack(self, read: _Tee, content: Digest, sizes: PullSizes) -> Unpacked:
        item = self.item

        def allow(size_bytes: int, so_far_bytes: int, on_disk_bytes: int) -> None:
            self.allowance.entry(item.number, size_bytes, so_far_bytes, on_disk_bytes)

        try:
            head = b""
            while len(head) < HEAD_BYTES and (more := read()):
                head += more
            with (
                self.windows.holding(window_bytes(head)),
                open(self.layer.log, "wb", _LOG_BUFFER_BYTES) as log,
            ):
                inflater = open_inflater(head, read, sizes.piece_bytes)
                unpacked = unpack_layer(
                    _Tee(inflater.next_piece, content),
                    self.layer.directory,
                    LogWriter(log),
                    allow,
                    functools.partial(self.allowance.content, item.number),
                    special=self.special,
                    is_image=self.is_image,
                )
                del inflater  # from here on its window is another one's
        except PullError as error:
            error.fields |= {"layer": item.object_id.uri}
            if isinstance(error, ArchiveInvalidError):
                self._blame(read, error)
            raise
        read.drain()
        return unpacked

    def _blame(self, read: _Tee, error: ArchiveInvalidError) -> None:
        """What looks damaged may have been damaged on the way: then that is the error."""
        if self.item.digest is None:
            return
        read.drain()
        try:
            read.digest.check(self.item.object_id.uri)
        except ChecksumMismatchError as mismatch:
            raise mismatch from error


@dataclass(slots=True)
class Comparing:
    """One file that is compared with what is known of it."""

    item: FileItem
    spool: Spool
    summing: Summing
    done: Callable[[], None]

    def run(self, sizes: PullSizes) -> None:
        """`compare` it, and tell."""
        self.compare(sizes)
        self.done()

    def compare(self, sizes: PullSizes) -> None:
        """Read all of it, and compare.

        Raises:
            ChecksumMismatchError: it is something else.
            Aborted: the pull has failed elsewhere.
        """
        with Digest(self.summing) as digest, self.spool.reading(sizes.piece_bytes) as read:
            _Tee(read, digest).drain()
            digest.check(self.item.object_id.uri)


Job = Unpacking | Comparing


class Workers:
    """Does jobs in threads, in the order given.

    Args:
        jobs: all of them.
        sizes: how many at once.
        slots: of the node.
        failed: called by the thread in which the first job fails.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        sizes: PullSizes,
        slots: NodeSlots,
        failed: Callable[[], None],
    ) -> None:
        self._jobs = deque(jobs)
        self._running: list[Job] = []
        self._sizes = sizes
        self._slots = slots
        self._failed = failed
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        count = min(sizes.unpacks, len(jobs))
        self._threads = [
            threading.Thread(target=self._work, name=f"fastload-unpack-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all jobs as soon as may be; what they wait for does not come any more."""
        self._stop.set()
        with self._lock:
            waiting = [*self._jobs, *self._running]
            self._jobs.clear()
        for job in waiting:
            job.spool.abort()

    def join(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    @property
    def error(self) -> BaseException | None:
        """The first error; further ones are its notes."""
        with self._lock:
            if not self._errors:
                return None
            first, *others = self._errors
        for other in others:
            first.add_note(f"also failed: {type(other).__name__}: {other}")
        return first

    def _work(self) -> None:
        try:
            while (job := self._take()) is not None:
                with self._slots.taken(1, self._stop) as held:
                    if held == 0:
                        return
                    job.run(self._sizes)
                with self._lock:
                    self._running.remove(job)
        except Aborted:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by whoever joins
            with self._lock:
                self._errors.append(error)
            self.stop()
            self._failed()

    def _take(self) -> Job | None:
        with self._lock:
            if self._stop.is_set() or not self._jobs:
                return None
            job = self._jobs.popleft()
            self._running.append(job)
            return job


class _Tee:
    """Gives pieces, and each of them to a digest as well."""

    def __init__(self, read: Callable[[], bytes], digest: Digest) -> None:
        self._read = read
        self.digest = digest

    def __call__(self) -> bytes:
        data = self._read()
        self.digest.update(data)
        return data

    def drain(self) -> None:
        while self():
            pass
