"""Runs the loopback store (native/s3_server.c) in a process of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.compiled import Programs
from benchmarks.work import Item

__all__ = ["Network", "S3Server"]


@dataclass(frozen=True, slots=True)
class Network:
    """What stands between the store and the client; the default is nothing.

    Attributes:
        latency_ms: before the first byte of each reply.
        connection_rate: bytes/s of one reply; 0: no limit.
        link_rate: bytes/s of all replies together; 0: no limit.
        slow_share, slow_factor: this share of the requests takes that many times as long.
        stall_share: this share never ends.
        seed: chooses which.
    """

    latency_ms: float = 0
    connection_rate: float = 0
    link_rate: float = 0
    slow_share: float = 0
    slow_factor: float = 1
    stall_share: float = 0
    seed: int = 1

    def arguments(self) -> list[str]:
        names = (name for name in self.__slots__)
        return [part for name in names for part in (_option(name), str(getattr(self, name)))]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class S3Server:
    """A store that ends with this process.

    Args:
        programs: where the built server is.
        items: its objects.
        network: latency, limits and faults.
        tls: serve HTTPS on localhost, with a private authority.

    Attributes:
        port: on 127.0.0.1, once entered.
        bundle: the authority's certificate; None without TLS.
    """

    def __init__(
        self,
        programs: Programs,
        items: tuple[Item, ...],
        network: Network | None = None,
        *,
        tls: bool = False,
    ) -> None:
        self._command = [str(programs.server), *(network or Network()).arguments()]
        self._items = [f"{item.name}:{item.size_bytes}" for item in items]
        self._tls = tls
        self.port = 0
        self.bundle: Path | None = None

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}" if self._tls else f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> S3Server:
        self._directory = tempfile.TemporaryDirectory(prefix="fastload-bench-")
        if self._tls:
            self._command += self._certificate(Path(self._directory.name))
        self._process = subprocess.Popen(
            [*self._command, *self._items],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def take_counters(self) -> dict[str, Any]:
        """What happened since the last call; request numbers start again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Its standard input closes: the server exits by itself.
        self._process.communicate()
        self._directory.cleanup()

    def _certificate(self, directory: Path) -> list[str]:
        from fastload_common.testing.certificates import PrivateAuthority

        authority = PrivateAuthority(directory)
        authority.server_context("localhost", "127.0.0.1")
        self.bundle = authority.bundle
        pem = str(next(directory.glob("server-*.pem")))
        return ["--cert", pem, "--key", pem]
