"""One receiver process as its parent sees it: start, talk, end, and how it ended.

Receivers run the interpreter of this process without its site-packages, so nothing but the
standard library and this package is there, and nothing of the engine is imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import fastload_common
from fastload_common.config import environment
from fastload_common.errors import ConfigError
from fastload_common.transfer.wire import Inbox, Message, Outbox
from fastload_common.units import even_share

__all__ = ["ReceiverProcess", "ReceiverSetup", "process_count", "shares"]

_log = logging.getLogger(__name__)

# Threads of one interpreter wait for its lock: with 32 a GiB over TLS took 1.7 times the CPU time.
_MOST_CONNECTIONS = 16
_FEW_CONNECTIONS = 4

# After the interpreter's own modules, so that nothing beside this package can replace one.
_BOOTSTRAP = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
import sys
sys.path.append(sys.argv[1])
from fastload_common.transfer.receiver_main import main
main(int(sys.argv[2]))
"""
_PASSED_ON = (
    *("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "OPENSSL_CONF", "OPENSSL_MODULES"),
    *("RES_OPTIONS", "LOCALDOMAIN", "HOSTALIASES"),
)
_SHOWN_CHARACTERS = 600


def process_count(connections: int, cpu_count: int) -> int:
    """How many receiver processes serve so many connections."""
    if connections <= _FEW_CONNECTIONS:
        return 1
    wanted = -(-connections // _MOST_CONNECTIONS)
    return max(2, min(wanted, max(4, 2 * cpu_count)))


def shares(connections: int, count: int) -> list[int]:
    """Connections divided among processes, as evenly as can be."""
    return [even_share(connections, number, count) for number in range(count)]


@dataclass(frozen=True, slots=True)
class ReceiverSetup:
    """What every receiver of some lanes is told when it starts.

    Attributes:
        memory_fd, memory_bytes: the staging memory; the descriptor stays its owner's.
        connect_timeout_s, read_timeout_s: of its connections.
    """

    memory_fd: int
    memory_bytes: int
    connect_timeout_s: float
    read_timeout_s: float


class ReceiverProcess:
    """A started receiver. For the thread that owns the lanes, except where it says "any thread".

    Args:
        setup: what it is told.

    Raises:
        ConfigError: it could not be started.

    Attributes:
        outbox: for any thread.
        is_ready: whether it has said that it is.
        crash: what it said of its own crash.
    """

    def __init__(self, setup: ReceiverSetup) -> None:
        self.is_ready = False
        self.crash = ""
        with contextlib.ExitStack() as undone:
            try:
                self.peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                undone.enter_context(self.peer)
                with theirs:
                    self._stderr = undone.enter_context(_memory_file())
                    self._process = _start(theirs, self._stderr.fileno())
            except OSError as error:
                raise ConfigError(
                    f"the receiver processes cannot be started: {sys.executable}: {error.strerror}",
                    hint="it is this interpreter's own program (sys.executable); for want of "
                    "resources raise the limits of processes and open files (ulimit -u, -n)",
                    errno=error.errno,
                ) from error
            undone.pop_all()
        self.peer.setblocking(False)
        self.outbox = Outbox(self.peer)
        self._inbox = Inbox()
        hello = {
            "pid": os.getpid(),
            "size_bytes": setup.memory_bytes,
            "connect_timeout_s": setup.connect_timeout_s,
            "read_timeout_s": setup.read_timeout_s,
        }
        frames = Outbox(self.peer)
        frames.add(["hello", hello])
        with contextlib.suppress(OSError):  # it is gone: read() will say so
            frames.flush([setup.memory_fd])

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> list[Message] | None:
        """What it has said since the last time; None: it has hung up."""
        return self._inbox.receive(self.peer)

    def flush(self) -> bool:
        """Send what is in the outbox, as far as the socket takes it; whether all. Any thread."""
        try:
            return self.outbox.flush()
        except OSError:
            return True  # it has gone, which `read` tells

    def hang_up(self) -> None:
        """Have it end at once, also if a process that was forked from this one has the socket."""
        with contextlib.suppress(OSError):
            self.peer.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it by force. Any thread."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is gone; whether it is. Any thread."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close what this process has of it; only when it is gone."""
        self.peer.close()
        self._stderr.close()

    def end_said(self) -> str:
        """How it ended, for a message."""
        status = self._process.returncode
        said = self.crash or self._last_words()
        if status is None:
            return "it hung up"
        if status >= 0:
            return f"it ended with status {status}" + (f": {said}" if said else "")
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-status).name}"
        return f"it was killed by signal {-status}"

    @property
    def was_killed(self) -> bool:
        return self._process.returncode == -signal.SIGKILL

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size_bytes = self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, size_bytes - _SHOWN_CHARACTERS))
            return self._stderr.read().decode("utf-8", "replace").strip()
        return ""


def _start(control: socket.socket, stderr_fd: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ConfigError(
            "the receiver processes cannot be started: this interpreter does not know its own "
            "program (sys.executable is empty)",
            hint="run the engine by the python program, not embedded in another one",
        )
    package = Path(fastload_common.__file__ or "").absolute().parent
    fd = control.fileno()
    without_caches = ["-B"] if sys.dont_write_bytecode else []
    options = ["-I", "-S", *without_caches, "-c", _BOOTSTRAP, str(package.parent), str(fd)]
    environ = environment()
    return subprocess.Popen(
        [sys.executable, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr_fd,
        close_fds=True,
        pass_fds=[fd],
        # Not in the terminal's foreground, so that an interrupt does not reach it.
        process_group=0,
        cwd="/",
        env={name: environ[name] for name in _PASSED_ON if name in environ},
    )


def _memory_file() -> IO[bytes]:
    """A file for what a receiver that cannot talk yet has to say."""
    try:
        return os.fdopen(os.memfd_create("fastload-recv-stderr"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile(prefix="fastload-recv-")
