"""Which lanes an object goes by: receiver processes where another process can ask, else threads."""

from __future__ import annotations

from collections.abc import Callable

from fastload_common.clock import Clock
from fastload_common.ranges import ObjectId
from fastload_common.source.base import OpensReceivers, RemoteReads, RemoteSource
from fastload_common.transfer.lanes import Attempt, Lanes
from fastload_common.transfer.mailbox import Mailbox
from fastload_common.transfer.policy import TransferPolicy
from fastload_common.transfer.process_lanes import ProcessLanes
from fastload_common.transfer.receiver_process import ReceiverSetup
from fastload_common.transfer.run import Staging
from fastload_common.transfer.thread_lanes import ThreadLanes

__all__ = ["RoutedLanes", "open_lanes"]


def open_lanes(
    source: OpensReceivers,
    memory: Staging,
    policy: TransferPolicy,
    mailbox: Mailbox,
    clock: Clock | None = None,
) -> RoutedLanes:
    """The lanes for a source. Starts nothing yet; closes nothing of what it is given.

    Args:
        memory: where the attempts' memory lies; must outlive the lanes.
        policy: ``concurrency`` is the first limit.
        mailbox: takes the events. The thread that waits in it calls all methods of the lanes.
        clock: for the times of events of this process.
    """

    def by_threads(limit: int) -> Lanes:
        return ThreadLanes(source.open_receiver, mailbox.post, limit, clock, memory.populate)

    def by_processes(limit: int) -> Lanes:
        setup = ReceiverSetup(
            memory.fd, memory.size_bytes, policy.connect_timeout_s, policy.read_timeout_s
        )
        return ProcessLanes(_remote_reads(source), setup, mailbox, limit, clock)

    return RoutedLanes(source, by_threads, by_processes, policy.concurrency)


class RoutedLanes:
    """Implements `Lanes` by those of two kinds, made when the first attempt needs them.

    A limit holds for each kind: a load that reads from a directory and from a store at once may
    have twice as many attempts.
    """

    def __init__(
        self,
        source: OpensReceivers,
        by_threads: Callable[[int], Lanes],
        by_processes: Callable[[int], Lanes],
        limit: int,
    ) -> None:
        # Asked once: the check looks at every name of the protocol.
        self._remote = source if isinstance(source, RemoteSource) else None
        self._make = {False: by_threads, True: by_processes}
        self._made: dict[bool, Lanes] = {}
        self._limit = limit
        self._closed = False

    def start(self, attempt: Attempt) -> None:
        """See `Lanes.start`."""
        if self._closed:
            raise RuntimeError("these lanes are closed")
        is_remote = _reads_of(self._remote, attempt.object_id) is not None
        lanes = self._made.get(is_remote)
        if lanes is None:
            lanes = self._made[is_remote] = self._make[is_remote](self._limit)
        lanes.start(attempt)

    def flush(self) -> None:
        """See `Lanes.flush`."""
        for lanes in self._made.values():
            lanes.flush()

    def cancel(self, attempt_id: int) -> None:
        """See `Lanes.cancel`."""
        for lanes in self._made.values():
            lanes.cancel(attempt_id)

    def set_limit(self, connections: int) -> None:
        """See `Lanes.set_limit`."""
        self._limit = connections
        for lanes in self._made.values():
            lanes.set_limit(connections)

    def close(self) -> None:
        """See `Lanes.close`."""
        self._closed = True
        for lanes in self._made.values():
            lanes.close()


def _reads_of(source: RemoteSource | None, object_id: ObjectId) -> RemoteReads | None:
    try:
        return source.remote_reads(object_id) if source is not None else None
    except ValueError:
        return None  # it is of no source: a receiver says so


def _remote_reads(source: OpensReceivers) -> Callable[[ObjectId], RemoteReads]:
    remote = source if isinstance(source, RemoteSource) else None

    def reads_of(object_id: ObjectId) -> RemoteReads:
        reads = _reads_of(remote, object_id)
        if reads is None:
            raise ValueError(f"{object_id.uri} cannot be read by another process")
        return reads

    return reads_of
