"""The exchange of one load: agree on who fetches what, fetch it, hand it around, leave together.

    join -> offer (memory) -> agree (needs of all, the same plan on each rank) -> fetch -> leave
                           -> read_alone (needs nothing of others)             -> leave

Each chunk of the plan has one owner, who fetches it into a slot of its own and tells the other
ranks that need it. They copy their parts out of their map of that memory and say so; after the
last one the slot is free. To take a peer's chunk needs no slot, so however few there are, nobody
waits in a circle. Memory is bounded by the slots: what is not taken holds up its owner only.

Used by one thread, but for what the peers' and the feeder's threads call.

Must not know: tensors, engines, requests.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from fastload_common.clock import Clock
from fastload_common.exchange.feeder import Feeder
from fastload_common.exchange.meeting import Met
from fastload_common.exchange.part import Part, divide, needs_told, part_of, sharers, told_of
from fastload_common.exchange.peers import Peers
from fastload_common.exchange.slots import (
    Filled,
    OwnChunk,
    PeerChunk,
    PeerMemories,
    Shared,
    read_only,
)
from fastload_common.exchange.terms import Terms
from fastload_common.exchange.words import ARENA_FORM, FILLED_FORM, TAKEN_FORM, Told, Word
from fastload_common.plan.records import Chunk, TensorRead
from fastload_common.ranges import ObjectId

if TYPE_CHECKING:
    from fastload_common.plan.needs import Needs

__all__ = ["NodeExchange"]

_log = logging.getLogger(__name__)


class NodeExchange:
    """Of one rank, with the other ranks of its host.

    Args:
        met: the ranks of this host; their sockets are this object's from now on.
        clock: see `Peers`.
        deadline_s, limit_s: see `Peers`.

    Attributes:
        received_bytes: in chunks that others fetched.
        fetched_bytes: in chunks that this rank fetched.
        given_bytes: of these, in those that others needed too.
    """

    def __init__(
        self,
        met: Met,
        clock: Clock,
        *,
        deadline_s: float | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._slots: dict[int, Shared] = {}  # what others have not taken yet
        self._arrived: deque[tuple[int, int, int | Filled]] = deque()  # rank, number, where
        self._feeder: Feeder | None = None
        self._feeder_error: BaseException | None = None
        self._terms: Terms | None = None
        self._part = Part()
        self._owners: dict[int, int] = {}  # of what is still to come, by number
        self._owed: Counter[int] = Counter()  # how many of these each rank owns
        self._numbers: dict[int, int] = {}  # of own chunks, by their identity
        self._comparing: tuple[int, ...] = ()  # who compares objects and shares
        self._memories = PeerMemories()
        self._last: OwnChunk | None = None  # that was handed out
        self._own_left = 0  # chunks of our own that have not come
        self._told = self._left = self._ended = self._by_object = False
        self.received_bytes = self.fetched_bytes = self.given_bytes = 0
        self._peers = Peers(
            met,
            clock,
            on_filled=self._hear_filled,
            on_taken=self._hear_taken,
            deadline_s=deadline_s,
            limit_s=limit_s,
        )

    # -- the load ---------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of this host, this one included."""
        return self._peers.ranks

    def check(self) -> None:
        """Raise `PeerError` if another rank has failed."""
        self._peers.check()

    def offer(self, terms: Terms) -> None:
        """Bring in this rank's part; before anything else is called but `check` and `end`."""
        self._terms = terms
        self._by_object = terms.by_object
        fd = read_only(terms.arena_fd)
        try:
            self._peers.tell(Word.ARENA, ARENA_FORM.pack(terms.arena_bytes), fd)
        finally:
            os.close(fd)

    def agree(self, reads: Sequence[TensorRead]) -> list[Chunk]:
        """Tell what this rank needs, hear what the others need, and divide it. Begins the fetch.

        Returns:
            The chunks that this rank needs, whoever fetches them; `fetch` brings them.

        Raises:
            PeerError: another rank has failed.
            DeadlineError: the load's deadline has passed.
            ObjectChangedError: the ranks found different objects: the model was changed.
            ChecksumMismatchError: they read different headers.
            FastloadError: what they need cannot be divided.
        """
        from fastload_common.plan.needs import Needs

        terms = self._its_terms()
        own = Needs.of(reads, terms.objects, gap_bytes=terms.gap_bytes)
        told = {self._peers.rank: self._tell(own.encode())}
        self._peers.wait(lambda: not self._silent(), self._silent, "the needs of")
        told |= self._hear_needs()
        me = self._peers.rank
        alike = {rank: row for rank, row in told.items() if row.uris == told[me].uris}
        self._by_object = any(row.by_object for row in alike.values())
        needs = {rank: own if rank == me else self._needs_of(rank, told) for rank in alike}
        sharing = sharers(told, me)
        self._comparing = tuple(rank for rank, row in sharing.items() if row.by_object)
        for rank, row in sharing.items():
            if self._by_object and not row.by_object:
                _log.warning(
                    "what rank %d fetches is not compared: it has no FASTLOAD_VERIFY", rank
                )
        shared = [needs[rank] for rank in sharing]
        plan = divide(shared, [*sharing.values()], by_object=self._by_object)
        self._begin(part_of(plan, terms.objects, [*sharing], me))
        return list(self._part.chunks.values())

    def fetch(self) -> Iterator[OwnChunk]:
        """Bring what `agree` returned, in any order; goes on where an earlier call ended.

        Whoever gets a chunk must release it; others may wait for its slot.

        Raises:
            PeerError: another rank has failed.
            DeadlineError: the load's deadline has passed.
            SourceError: as the fetch raised it.
        """
        while self._owners:
            self._last = self._next()
            yield self._last
        self._join_feeder()  # whoever reads by itself afterwards uses the same way

    def read_alone(self) -> None:
        """This rank needs nothing (more) of the others: it will read by itself.

        Where it has agreed already, it takes and gives what it must, and uses nothing of it.

        Raises:
            see `fetch`.
        """
        if not self._told:
            self._tell(b"")
        if self._last is not None:
            self._last.release()  # where the error came between its fetch and its use
        for chunk in self.fetch():
            chunk.release()

    def objects_of_others(self) -> frozenset[ObjectId]:
        """The objects that other ranks compare, where objects are compared as a whole.

        Those of which another one fetches something, and the others' part of those of which
        nobody does: these are divided among those that share and compare.
        """
        if not self._by_object or not self._part.facts:
            return frozenset()
        objects = self._its_terms().objects
        own = {self._part.chunks[number].object_id for number in self._part.takers}
        if self._peers.rank in self._comparing:
            first, step = self._comparing.index(self._peers.rank), len(self._comparing)
            own |= {objects[k] for k in self._part.unneeded[first::step]}
        return frozenset(objects) - own

    def leave(self) -> None:
        """Say that all is done, and wait until the others have taken what they need of this rank.

        Where objects are compared as a whole, also until the others have compared theirs.

        Raises:
            see `fetch`.
        """
        if self._left:
            return
        self.read_alone()
        self._peers.tell(Word.DONE)
        self._peers.wait(lambda: not self._laggards(), self._laggards, "what is shared with")
        self._left = True

    def end(self, error: BaseException | None = None) -> None:
        """End all threads, sockets and maps; tell an error to the others first. Never raises twice.

        Raises:
            see `leave`, which is done now where it was not, unless there is an error.
        """
        if self._ended:
            return
        self._ended = True
        if isinstance(error, GeneratorExit):
            error = None  # whoever read has enough
        try:
            if error is None and self._terms is not None:
                self.leave()
        except BaseException as late:
            error = late
            raise
        finally:
            self._peers.close(error)
            self._stop()

    def facts(self) -> dict[str, object]:
        """Numbers for the report."""
        return {
            "fetched_for_others_bytes": self.given_bytes,
            "received_bytes": self.received_bytes,
            "wait_s": round(self._peers.waited_s, 6),
            **self._part.facts,
        }

    # -- agreeing ---------------------------------------------------------------------------

    def _its_terms(self) -> Terms:
        if self._terms is None:
            raise RuntimeError("nothing was offered yet")
        return self._terms

    def _tell(self, needs: bytes) -> Told:
        """Tell all others what is needed, once."""
        told = told_of(self._its_terms(), needs)
        self._peers.tell(Word.NEEDS, told.encode())
        self._told = True
        return told

    def _silent(self) -> list[int]:
        return [rank for rank, line in self._peers.lines.items() if line.told is None]

    def _hear_needs(self) -> dict[int, Told]:
        lines = self._peers.lines.items()
        return {rank: line.told for rank, line in lines if line.told is not None}

    def _needs_of(self, rank: int, told: dict[int, Told]) -> Needs:
        try:
            return needs_told(rank, told, self._peers.rank, self._its_terms().objects)
        except ValueError as error:
            self._accuse(rank, f"its needs make no sense ({error})")

    def _begin(self, part: Part) -> None:
        """Fetch what is this rank's to fetch, from now on."""
        self._part = part
        self._owners = dict(part.owners)
        self._owed = Counter(part.owners.values())
        self._own_left = len(part.takers)
        if part.takers:
            own = [part.chunks[number] for number in part.takers]
            self._numbers = {id(chunk): n for chunk, n in zip(own, part.takers, strict=True)}
            self._feeder = Feeder(self._its_terms().fetch, own, self._share, self._hear_end)

    # -- fetching ---------------------------------------------------------------------------

    def _next(self) -> OwnChunk:
        """The next chunk to arrive, wherever it was fetched."""
        self._peers.wait(
            lambda: bool(self._arrived) or self._feeder_error is not None or self._left_owing(),
            lambda: sorted({*self._owners.values()} - {self._peers.rank}),
            "chunks of",
            counted=not self._own_left,
        )
        if self._feeder_error is not None:
            raise self._feeder_error
        rank, number, where = self._arrived.popleft()
        if self._owners.get(number) != rank:
            if isinstance(where, int):
                self._accuse(rank, f"it told of chunk {number}, which was not awaited from it")
            raise RuntimeError(f"chunk {number} was fetched twice")
        del self._owners[number]
        self._owed[rank] -= 1
        chunk = self._part.chunks[number]
        size_bytes = chunk.byte_range.size_bytes
        if isinstance(where, int):
            data = self._look(rank, where, size_bytes)
            self.received_bytes += size_bytes
            return PeerChunk(chunk, data, lambda: self._acknowledge(rank, number))
        self._own_left -= 1
        self.fetched_bytes += size_bytes
        if not self._part.takers[number]:
            return OwnChunk(chunk, where.data, where.release)
        self.given_bytes += size_bytes
        return OwnChunk(chunk, where.data, lambda: self._hear_taken(rank, number))

    def _left_owing(self) -> bool:
        """Accuse who left while this rank still awaits chunks of it; for when none has arrived."""
        for rank, line in self._peers.lines.items():
            if self._owed[rank] and (line.is_done or not line.is_open):
                number = min(n for n, owner in self._owners.items() if owner == rank)
                self._accuse(rank, f"it left without chunk {number}, which it was to fetch")
        return False

    def _look(self, rank: int, position_bytes: int, size_bytes: int) -> memoryview:
        """A part of another rank's memory."""
        try:
            arena = self._peers.lines[rank].arena
            return self._memories.look(rank, arena, position_bytes, size_bytes)
        except ValueError as error:
            self._accuse(rank, f"its memory cannot be read: {error}")

    def _acknowledge(self, rank: int, number: int) -> None:
        self._peers.send(rank, Word.TAKEN, TAKEN_FORM.pack(number))

    def _accuse(self, rank: int, text: str) -> NoReturn:
        self._peers.accuse(rank, text)
        self._peers.check()
        raise RuntimeError("an accusation that ended nothing")

    def _laggards(self) -> list[int]:
        """Who has still to take something of this rank, or to compare its objects."""
        waits = {rank for slot in list(self._slots.values()) for rank in slot.takers}
        if self._by_object:
            waits |= {rank for rank, line in self._peers.lines.items() if not line.is_done}
        return sorted(waits - {self._peers.rank})

    def _join_feeder(self) -> None:
        if self._feeder is not None:
            self._feeder.join()
        if self._feeder_error is not None:
            raise self._feeder_error

    def _stop(self) -> None:
        """Give all memory back. Nobody tells anything any more, but the feeder perhaps."""
        if self._feeder is not None and not self._feeder.stop(self._its_terms().abort):
            _log.warning("the fetch for other ranks did not end in time")
        for slot in list(self._slots.values()):
            slot.abandon()
        self._slots.clear()
        for _, _, where in self._arrived:
            if not isinstance(where, int):
                where.release()
        self._arrived.clear()
        self._memories.close()

    # -- called by other threads ------------------------------------------------------------

    def _share(self, filled: Filled) -> None:
        """The feeder has a chunk: for this rank, and for those that it tells."""
        number = self._numbers[id(filled.chunk)]
        takers = self._part.takers[number]
        if takers:
            self._slots[number] = Shared(filled, (self._peers.rank, *takers))
        with self._peers.changed:
            self._arrived.append((self._peers.rank, number, filled))
            self._peers.changed.notify_all()
        said = FILLED_FORM.pack(number, filled.position_bytes)
        for rank in takers:
            self._peers.send(rank, Word.FILLED, said)

    def _hear_end(self, error: BaseException | None) -> None:
        if error is not None:
            with self._peers.changed:
                self._feeder_error = error
                self._peers.changed.notify_all()

    def _hear_filled(self, rank: int, number: int, position_bytes: int) -> None:
        with self._peers.changed:
            self._arrived.append((rank, number, position_bytes))
            self._peers.changed.notify_all()

    def _hear_taken(self, rank: int, number: int) -> None:
        """One rank, perhaps this one, has what it needs of an own chunk.

        Raises:
            KeyError: it was not to take it, or has already.
        """
        if self._slots[number].taken_by(rank):
            with self._peers.changed:
                del self._slots[number]
                self._peers.changed.notify_all()
