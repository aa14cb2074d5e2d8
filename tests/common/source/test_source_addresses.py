"""Which of a name's addresses a connection goes to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastload_common.errors import SourceUnavailableError
from fastload_common.source.http_connection import HttpConnection
from fastload_common.source.http_message import Endpoint
from fastload_common.source.http_socket import addresses

V6 = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"fd00::{n}", 80, 0, 0)) for n in range(3)]
V4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{n}", 80)) for n in range(8)]

Resolve = Callable[[list[Any]], None]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Have every name stand for these."""

    def resolve(found: list[Any]) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    return resolve


def test_connections_begin_at_different_addresses_and_know_them_all(resolve: Resolve) -> None:
    resolve(V4)
    orders = [addresses("s3", 80) for _ in range(200)]
    assert all(sorted(order) == V4 for order in orders)
    # The chance that one of eight is missing among 200 is 1 in 50 thousand millions.
    assert {order[0] for order in orders} == set(V4)


def test_the_systems_preference_of_a_family_is_kept(resolve: Resolve) -> None:
    resolve([*V6, *V4])
    for _ in range(50):
        order = addresses("s3", 80)
        assert sorted(order[:3]) == V6
        assert sorted(order[3:]) == V4


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_an_address_that_refuses_is_not_the_end(resolve: Resolve, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refused = unused.getsockname()
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    resolve([(*entry, refused), (*entry, ("127.0.0.1", port)), (*entry, refused)])
    for _ in range(6):
        connection = HttpConnection(Endpoint("s3", 80, False), None, 5, 5)
        connection._connect()
        assert connection._socket is not None
        assert connection._socket.getpeername()[1] == port
        connection.close()
    resolve([(*entry, refused)])
    connection = HttpConnection(Endpoint("s3", 80, False), None, 5, 5)
    with pytest.raises(SourceUnavailableError, match="refused"):
        connection.get("/", {})
