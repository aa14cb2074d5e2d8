"""The ranks of one host find each other and connect, all of them or none.

First each rank tells all others who it is (`Card`), over the engine's own group. Then the ranks
of one host connect in pairs by abstract Unix sockets, the lower one to the higher one: the kernel
says whose process the other side is, and a random token that it is of this group, so neither
another user nor another engine is met. At last each tells how it went: where one of a host could
not, all of that host read alone, and one of them says why.

Must not know: what is exchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastload_common.clock import Clock
from fastload_common.exchange.card import TOKEN_BYTES, Card
from fastload_common.exchange.group import RankGroup

__all__ = ["MOST_RANKS", "Alone", "Met", "meet", "uid_of"]

_log = logging.getLogger(__name__)

# Each pair has a socket: beyond it they are too many descriptors for what they save.
MOST_RANKS = 64
_HELLO = struct.Struct(f"=I{TOKEN_BYTES}s")
# All sides listen before anybody connects, so this is only for a process that does not run.
_PATIENCE_S = 10.0
_CREDENTIALS = struct.Struct("3i")

Uid = Callable[[socket.socket], int]


def uid_of(peer: socket.socket) -> int:
    """Whose process the other side of a Unix socket is, as the kernel says."""
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return int(uid)


@dataclass(frozen=True, slots=True)
class Alone:
    """This rank reads alone.

    Attributes:
        reason: why.
        ranks: how many ranks run on this host, as far as is known.
    """

    reason: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Met:
    """The ranks of this host, connected. Whoever gets it owns the sockets.

    Attributes:
        own: this rank.
        lines: the others, in ascending order, with a socket to each.
    """

    own: Card
    lines: tuple[tuple[Card, socket.socket], ...]


def meet(
    group: RankGroup,
    clock: Clock,
    *,
    why_not: str = "",
    uid: Uid = uid_of,
    make_card: Callable[..., Card] = Card.make,
    patience_s: float = _PATIENCE_S,
) -> Met | Alone:
    """Meet the other ranks of this host. Every rank of the group must call it.

    Args:
        why_not: this rank will not meet, because it was told so.
        uid: whose process a peer is (tests give another answer).
        make_card: makes the card (tests give another host).
        patience_s: the longest wait for the others to connect.
    """
    card = make_card(group.rank, why_not=why_not, quiet=bool(why_not))
    listener, card = _listen(card)
    lines: dict[int, socket.socket] = {}
    try:
        cards = [_card(rank, data) for rank, data in enumerate(group.all_gather(card.encode()))]
        here = [other for other in cards if other.host == card.host and other.host.boot]
        here = here or [card]
        reason = _why_not(cards, here)
        if not reason and len(here) > 1 and listener is not None:
            reason = _connect(card, here, listener, lines, uid, clock, patience_s)
        told = group.all_gather(json.dumps(reason).encode())
        reasons = [_reason(other.rank, told[other.rank]) for other in here]
        reason = next((why for why in reasons if why), "")
        if len(here) == 1:
            reason = reason or "no other rank runs on this host"
        if reason:
            _say(card, here, cards, reason)
            return Alone(reason, len(here))
        others = [other for other in here if other.rank != card.rank]
        return Met(card, tuple((other, lines.pop(other.rank)) for other in others))
    finally:
        for line in lines.values():
            line.close()
        if listener is not None:
            listener.close()


def _card(rank: int, data: bytes) -> Card:
    """What a rank told of itself; another version may have told what cannot be read here."""
    with contextlib.suppress(ValueError):
        card = Card.decode(data)
        if card.rank == rank:
            return card
    return Card.of_a_stranger(rank)


def _reason(rank: int, data: bytes) -> str:
    """Why a rank could not meet, as it told; empty if it could."""
    with contextlib.suppress(ValueError, RecursionError):
        reason = json.loads(data)
        if isinstance(reason, str):
            return reason
    return f"rank {rank} told what cannot be understood"


def _listen(card: Card) -> tuple[socket.socket | None, Card]:
    """Open the door before the address is told to anybody."""
    if card.why_not:
        return None, card
    try:
        return card.listen(), card
    except OSError as error:
        reason = f"rank {card.rank} can have no Unix socket ({error.strerror})"
        return None, replace(card, why_not=reason)


def _why_not(cards: Sequence[Card], here: Sequence[Card]) -> str:
    """What is known from the cards already, the same on each rank of a host; empty: nothing."""
    first = here[0]
    for card in cards:
        if not card.address and card.version != first.version:
            return f"rank {card.rank} runs another version of fastload than {first.version}"
    for card in here:
        if card.why_not:
            return card.why_not
        if card.version != first.version:
            return (
                f"rank {card.rank} runs fastload {card.version}, rank {first.rank} {first.version}"
            )
        if card.uid != first.uid:
            return (
                f"rank {card.rank} runs as user {card.uid}, rank {first.rank} as user {first.uid}"
            )
    if len(here) > MOST_RANKS:
        return f"{len(here)} ranks on this host are more than {MOST_RANKS}"
    elsewhere = [c.rank for c in cards if c.host.boot == first.host.boot and c not in here]
    if len(here) == 1 and elsewhere and first.host.boot:
        return f"rank {elsewhere[0]} runs in another container (network namespace) of this host"
    return ""


def _say(card: Card, here: Sequence[Card], cards: Sequence[Card], reason: str) -> None:
    """One line for each host, by its lowest rank."""
    if card.rank != here[0].rank:
        return
    wished = len(here) == 1 or any(c.quiet and c.why_not == reason for c in here)
    separate = len(here) == 1 and any(
        c.host.boot == card.host.boot and c.rank != card.rank for c in cards
    )
    level = logging.WARNING if separate or not wished else logging.INFO
    _log.log(
        level,
        "the %d ranks of this host read alone, what several of them need more than once: %s",
        len(here),
        reason,
    )


def _connect(
    card: Card,
    here: Sequence[Card],
    listener: socket.socket,
    lines: dict[int, socket.socket],
    uid: Uid,
    clock: Clock,
    patience_s: float,
) -> str:
    """Fill ``lines``; returns why that was not possible, or an empty text."""
    door = _Door(card, {other.rank: other for other in here}, lines, uid)
    end_s = clock.monotonic_s() + patience_s
    try:
        with contextlib.closing(door):
            door.open(listener)
            while not door.reason and not door.is_complete:
                left_s = end_s - clock.monotonic_s()
                if left_s <= 0:
                    return f"rank {card.rank} was not reached by rank {door.missing()} in time"
                door.turn(min(left_s, 0.1))
            return door.reason
    except OSError as error:
        return f"rank {card.rank} could not connect ({error.strerror or type(error).__name__})"


class _Door:
    """The sockets of one rank while they become lines."""

    def __init__(
        self, card: Card, here: dict[int, Card], lines: dict[int, socket.socket], uid: Uid
    ) -> None:
        self._card = card
        self._here = here
        self._lines = lines
        self._uid = uid
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, bytearray] = {}
        self._called: dict[socket.socket, int] = {}  # those that this rank connected to
        self.reason = ""

    @property
    def is_complete(self) -> bool:
        return len(self._lines) == len(self._here) - 1

    def missing(self) -> int:
        return min(rank for rank in self._here if self._is_missing(rank))

    def open(self, listener: socket.socket) -> None:
        """Connect to the higher ranks, and wait for the lower ones."""
        self._selector.register(listener, selectors.EVENT_READ)
        for other in self._here.values():
            if other.rank > self._card.rank:
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._called[peer] = other.rank
                self._add(peer)
                peer.settimeout(_PATIENCE_S)
                peer.connect(b"\0" + other.address.encode())
                peer.send(_HELLO.pack(self._card.rank, self._card.token), socket.MSG_NOSIGNAL)
                peer.setblocking(False)

    def turn(self, timeout_s: float) -> None:
        """Take what has come; waits for it at most so long."""
        for key, _ in self._selector.select(timeout_s):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            if peer in self._pending:
                self._read(peer)
            else:
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    self._add(peer.accept()[0])

    def close(self) -> None:
        self._selector.close()
        for peer in self._pending:
            peer.close()
        self._pending.clear()

    def _add(self, peer: socket.socket) -> None:
        self._pending[peer] = bytearray()
        peer.setblocking(False)
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        said = self._pending[peer]
        try:
            # No byte more: what follows is for the line.
            data = peer.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        if data and len(said) < _HELLO.size:
            return
        self._selector.unregister(peer)
        del self._pending[peer]
        try:
            rank = self._known(peer, bytes(said))
        except OSError:
            peer.close()
            raise
        if rank is not None:
            self._lines[rank] = peer
            return
        peer.close()
        called = self._called.get(peer)
        if called is not None and not self.reason:
            self.reason = f"rank {self._card.rank} was refused by rank {called}"

    def _known(self, peer: socket.socket, said: bytes) -> int | None:
        """Who this is; None for a stranger, who is sent away."""
        if len(said) < _HELLO.size:
            return None
        rank, token = _HELLO.unpack(said)
        called = self._called.get(peer)
        card = self._here.get(rank)
        if card is None or token != card.token or called not in (None, rank):
            return None
        if called is None and (rank >= self._card.rank or not self._is_missing(rank)):
            return None
        uid = self._uid(peer)
        if uid != self._card.uid:
            self.reason = f"rank {rank} runs as user {uid}, rank {self._card.rank} does not"
            return None
        if called is None:
            peer.send(_HELLO.pack(self._card.rank, self._card.token), socket.MSG_NOSIGNAL)
        return int(rank)

    def _is_missing(self, rank: int) -> bool:
        return rank not in self._lines and rank != self._card.rank
