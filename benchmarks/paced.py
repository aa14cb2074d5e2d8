"""A proxy that lets each connection have so many bytes per second, for next to no CPU.

    python -m benchmarks.paced HOST:PORT BYTES_PER_S

Prints its own port, and ends when its input is closed. The kernel paces what goes to the client
(SO_MAX_PACING_RATE), and bytes go from socket to socket within it (splice).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

__all__ = ["paced"]

_SO_MAX_PACING_RATE = 47
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031


@contextlib.contextmanager
def paced(upstream: str, bytes_per_s: int) -> Iterator[str]:
    """Run one; gives its ``host:port``."""
    command = [sys.executable, "-m", "benchmarks.paced", upstream, str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        try:
            yield f"127.0.0.1:{int(run.stdout.readline())}"
        finally:
            run.stdin.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    """Move all bytes from one to the other, and then its end."""
    import fcntl

    reading, writing = os.pipe()
    fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        while count := os.splice(source.fileno(), writing, _PIPE_BYTES):
            while count:
                count -= os.splice(reading, target.fileno(), count)
    except OSError:
        pass
    finally:
        os.close(reading)
        os.close(writing)
        for one in (target, source):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR if one is target else socket.SHUT_RD)


def _serve(client: socket.socket, host: str, port: int, bytes_per_s: int) -> None:
    client.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)
    with client, socket.create_connection((host, port)) as upstream:
        asking = threading.Thread(target=_carry, args=(client, upstream), daemon=True)
        asking.start()
        _carry(upstream, client)
        asking.join()


def main() -> int:
    host, _, port = sys.argv[1].rpartition(":")
    bytes_per_s = int(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        print(server.getsockname()[1], flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        while True:
            client, _ = server.accept()
            work = threading.Thread(
                target=_serve, args=(client, host, int(port), bytes_per_s), daemon=True
            )
            work.start()


if __name__ == "__main__":
    sys.exit(main())
