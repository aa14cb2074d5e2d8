"""Who a rank is and where it can be reached, as it tells all the others before they have met."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from fastload_common import __version__

__all__ = ["Card", "Host", "TOKEN_BYTES", "this_host"]

TOKEN_BYTES = 32
# What stands for fields that a card lacks: with its version it will not be met.
_OF_OLD = [0, 0, 0, "", "", "", "", "unknown", "", False]
_LEAST_FIELDS = 5  # up to where it runs
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True)
class Host:
    """What two processes must have in common to reach each other by abstract sockets.

    Attributes:
        boot: the running kernel.
        network: the network namespace, as containers have their own.
    """

    boot: str
    network: str


def this_host() -> Host:
    """Where this process runs.

    Raises:
        OSError: the system does not tell.
    """
    with open(_BOOT_ID, encoding="ascii") as file:
        boot = file.read().strip()
    namespace = os.stat(_NETWORK)
    return Host(boot, f"{namespace.st_dev}:{namespace.st_ino}")


@dataclass(frozen=True, slots=True)
class Card:
    """One rank. The token is a secret of this group: shown nowhere.

    Attributes:
        why_not: why this rank will not meet anybody; empty if it will.
        quiet: whether that is nothing to warn of.
    """

    rank: int
    pid: int
    uid: int
    host: Host
    address: str
    token: bytes = field(repr=False)
    version: str = __version__
    why_not: str = ""
    quiet: bool = False

    @classmethod
    def make(
        cls,
        rank: int,
        *,
        why_not: str = "",
        quiet: bool = False,
        where: Callable[[], Host] = this_host,
    ) -> Card:
        """This process's card, with a new address and token."""
        try:
            host = where()
        except OSError as error:
            host = Host("", "")
            why_not = why_not or f"this system does not say which host it is ({error.strerror})"
        return cls(
            rank,
            os.getpid(),
            os.geteuid(),
            host,
            f"fastload-{secrets.token_hex(16)}",
            secrets.token_bytes(TOKEN_BYTES),
            why_not=why_not,
            quiet=quiet,
        )

    def encode(self) -> bytes:
        fields = [self.rank, self.pid, self.uid, self.host.boot, self.host.network, self.address]
        fields += [self.token.hex(), self.version, self.why_not, self.quiet]
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Card:
        """Read a card, also of another version, which may have more fields or fewer.

        Raises:
            ValueError: it is no card.
        """
        try:
            told = json.loads(data)
            if not isinstance(told, list) or len(told) < _LEAST_FIELDS:
                raise TypeError
            fields = [*told, *_OF_OLD[len(told) :]][: len(_OF_OLD)]
            if any(type(a) is not type(b) for a, b in zip(fields, _OF_OLD, strict=True)):
                raise TypeError
            rank, pid, uid, boot, network, address, token, version, why_not, quiet = fields
            host = Host(boot, network)
            return cls(rank, pid, uid, host, address, bytes.fromhex(token), version, why_not, quiet)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"no card of a rank: {type(error).__name__}") from None

    @classmethod
    def of_a_stranger(cls, rank: int) -> Card:
        """Stands for a card that cannot be read."""
        return cls(rank, 0, 0, Host("", ""), "", b"", version="unknown")

    def listen(self) -> socket.socket:
        """A socket at this card's address; the caller owns it.

        Raises:
            OSError: it cannot be had.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(b"\0" + self.address.encode())
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener
