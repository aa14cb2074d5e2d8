"""Who meets whom: all ranks of one host and of one group, or none of them."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from fastload_common.clock import SystemClock
from fastload_common.exchange import meeting
from fastload_common.exchange.card import Card, Host
from fastload_common.exchange.meeting import Alone, Met, meet, uid_of
from tests.common.exchange.exchange_harness import Board

Change = Callable[[Card], Card]


def same(card: Card) -> Card:
    return card


def meet_all(
    changes: Sequence[Change], *, board: Board | None = None, **options: Any
) -> list[Met | Alone]:
    """Meet as so many ranks, whose cards are changed; options may be given for each rank."""
    size = len(changes)
    board = board or Board(size)
    found: list[Any] = [None] * size

    def work(rank: int) -> None:
        def make_card(number: int, **more: Any) -> Card:
            return changes[rank](Card.make(number, **more))

        own = {k: v[rank] if isinstance(v, list) else v for k, v in options.items()}
        try:
            found[rank] = meet(board.group(rank), SystemClock(), make_card=make_card, **own)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=work, args=(k,)) for k in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def hang_up(found: Sequence[Met | Alone]) -> None:
    for row in found:
        if isinstance(row, Met):
            for _, line in row.lines:
                line.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize("size", [2, 3, 9])
def test_all_ranks_of_a_host_are_connected_in_pairs(
    size: int, log: pytest.LogCaptureFixture
) -> None:
    found = meet_all([same] * size)
    mets = [row for row in found if isinstance(row, Met)]
    assert len(mets) == size
    for rank, met in enumerate(mets):
        assert met.own.rank == rank
        assert [card.rank for card, _ in met.lines] == [k for k in range(size) if k != rank]
        for card, line in met.lines:
            line.send(bytes([rank, card.rank]))
    for rank, met in enumerate(mets):
        for card, line in met.lines:
            assert line.recv(2) == bytes([card.rank, rank])  # and not a byte of the greeting
    hang_up(found)
    assert log.text == ""


def on(host: str, network: str = "1") -> Change:
    return lambda card: replace(card, host=Host(host, network))


def test_ranks_of_two_hosts_meet_on_each_of_them(log: pytest.LogCaptureFixture) -> None:
    found = meet_all([on("a"), on("b"), on("a"), on("b"), on("c")])
    others = [
        [card.rank for card, _ in row.lines] if isinstance(row, Met) else row.reason
        for row in found
    ]
    assert others == [[2], [3], [0], [1], "no other rank runs on this host"]
    hang_up(found)
    assert [record.levelname for record in log.records] == ["INFO"]


def test_another_container_of_the_host_is_told_of(log: pytest.LogCaptureFixture) -> None:
    found = meet_all([on("a", "1"), on("a", "2")])
    assert [type(row) for row in found] == [Alone, Alone]
    assert found[1] == Alone("rank 0 runs in another container (network namespace) of this host", 1)
    assert [record.levelname for record in log.records] == ["WARNING", "WARNING"]


def test_a_system_that_does_not_say_which_host_it_is_reads_alone(
    log: pytest.LogCaptureFixture,
) -> None:
    def nowhere() -> Host:
        raise FileNotFoundError(2, "No such file")

    card = Card.make(0, where=nowhere)
    assert card.host == Host("", "")
    assert "does not say which host it is" in card.why_not
    found = meet_all([lambda c: replace(c, host=Host("", ""), why_not=card.why_not), same])
    assert [type(row) for row in found] == [Alone, Alone]
    assert found[0] == Alone(card.why_not, 1)


def test_who_claims_another_user_is_not_met(log: pytest.LogCaptureFixture) -> None:
    found = meet_all([same, lambda card: replace(card, uid=card.uid + 1), same])
    uid = Card.make(0).uid
    reason = f"rank 1 runs as user {uid + 1}, rank 0 as user {uid}"
    assert found == [Alone(reason, 3)] * 3
    assert len(log.records) == 1
    assert reason in log.text


def test_who_is_another_user_by_the_kernel_is_not_met(log: pytest.LogCaptureFixture) -> None:
    # Rank 2 sees the kernel name another user behind the socket of rank 0.
    def foreign(peer: socket.socket) -> int:
        return uid_of(peer) + 1

    found = meet_all([same] * 3, uid=[uid_of, uid_of, foreign], patience_s=3.0)
    assert [type(row) for row in found] == [Alone] * 3
    assert len({row.reason for row in found if isinstance(row, Alone)}) == 1
    assert len(log.records) == 1


def test_two_versions_do_not_meet() -> None:
    found = meet_all([same, lambda card: replace(card, version="0.0")])
    assert all(isinstance(row, Alone) and "rank 1 runs fastload 0.0" in row.reason for row in found)


def test_off_on_one_rank_is_off_on_all_and_no_warning(log: pytest.LogCaptureFixture) -> None:
    found = meet_all([same] * 3, why_not=["", "FASTLOAD_EXCHANGE=off", ""])
    assert found == [Alone("FASTLOAD_EXCHANGE=off", 3)] * 3
    assert [record.levelname for record in log.records] == ["INFO"]


def test_no_socket_to_be_had_is_told(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    listen = Card.listen

    def refused(self: Card) -> socket.socket:
        if self.rank == 1:
            raise PermissionError(1, "Operation not permitted")
        return listen(self)

    monkeypatch.setattr(Card, "listen", refused)
    found = meet_all([same, same])
    reason = "rank 1 can have no Unix socket (Operation not permitted)"
    assert found == [Alone(reason, 2)] * 2
    assert [record.levelname for record in log.records] == ["WARNING"]


def test_too_many_ranks_of_a_host_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MOST_RANKS", 2)
    found = meet_all([same] * 3)
    assert found == [Alone("3 ranks on this host are more than 2", 3)] * 3


def test_strangers_at_the_door_are_sent_away() -> None:
    """They connect first, say nothing, or rubbish, or what another rank may say; nobody waits."""
    strangers: list[socket.socket] = []

    def visited(card: Card) -> Card:
        listener = card.listen()
        for words in (b"", b"x", bytes(36), (0).to_bytes(4, "little") + card.token):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.connect(b"\0" + card.address.encode())
            stranger.send(words)
            strangers.append(stranger)
        door = listener

        class Visited(Card):
            def listen(self) -> socket.socket:
                return door

        return Visited(card.rank, card.pid, card.uid, card.host, card.address, card.token)

    found = meet_all([same, visited])
    assert [type(row) for row in found] == [Met, Met]
    hang_up(found)
    for stranger in strangers:
        stranger.settimeout(5)
        assert stranger.recv(100) == b""  # not one word was said to them
        stranger.close()


def test_a_rank_that_never_connects_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    opened = meeting._Door.open

    def lazy(self: Any, listener: socket.socket) -> None:
        if self._card.rank != 0:
            opened(self, listener)

    monkeypatch.setattr(meeting._Door, "open", lazy)
    found = meet_all([same, same], patience_s=0.3)
    assert [type(row) for row in found] == [Alone, Alone]
    assert "was not reached" in log.text
    assert len(log.records) == 1


def test_two_engines_at_once_do_not_meet_each_other() -> None:
    results: dict[str, list[Met | Alone]] = {}

    def engine(name: str) -> None:
        results[name] = meet_all([same] * 3)

    threads = [threading.Thread(target=engine, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    tokens = {}
    for name, found in results.items():
        mets = [row for row in found if isinstance(row, Met)]
        assert len(mets) == 3
        tokens[name] = {met.own.token for met in mets}
        for met in mets:
            assert {card.token for card, _ in met.lines} == tokens.get(name, set()) - {
                met.own.token
            }
        hang_up(found)
    assert not tokens["one"] & tokens["other"]


def test_a_card_shows_no_token() -> None:
    card = Card.make(3)
    assert card.token.hex() not in repr(card)
    assert repr(card.token) not in repr(card)
    assert Card.decode(card.encode()) == card


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[1,2,3]", b'"text"'])
def test_what_is_no_card_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no card of a rank"):
        Card.decode(data)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (lambda fields: [*fields[:7], "99.0", *fields[8:], "more"], "rank 1 runs fastload 99.0"),
        (lambda fields: fields[:6], "rank 1 runs fastload unknown"),
        (lambda fields: {"a card": "of another kind"}, "rank 1 runs another version of fastload"),
        (lambda fields: [7, *fields[1:]], "rank 1 runs another version of fastload"),
        (lambda fields: ["x", *fields[1:]], "rank 1 runs another version of fastload"),
        (lambda fields: [*fields[:6], "no hex", *fields[7:]], "rank 1 runs another version"),
    ],
)
def test_a_card_of_another_version_is_a_reason_to_read_alone(
    told: Callable[[Any], object], reason: str
) -> None:
    board = Board(3)

    class Later(Card):
        __slots__ = ()

        def encode(self) -> bytes:
            return json.dumps(told(json.loads(Card.encode(self)))).encode()

    def later(card: Card) -> Card:
        return Later(**{one.name: getattr(card, one.name) for one in fields(card)})

    found = meet_all([same, later, same], board=board)
    for row in (found[0], found[2]):
        assert isinstance(row, Alone)
        assert reason in row.reason


def test_a_reason_that_cannot_be_understood_is_one() -> None:
    assert meeting._reason(3, b"[") == "rank 3 told what cannot be understood"
    assert meeting._reason(3, b"7") == "rank 3 told what cannot be understood"
    assert meeting._reason(3, b'""') == ""
