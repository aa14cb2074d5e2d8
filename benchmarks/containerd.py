"""A containerd of one's own, for `ctr images pull` as a peer: everything below one directory.

Its root, state, socket and temporary files are below that directory; it sees a mount namespace of
its own, so its mounts end with it, and it ends with the process that started it. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastload_common.testing.registry_server import missing_programs

__all__ = ["Containerd", "containerd", "why_absent"]

_START_DEADLINE_S, _STOP_DEADLINE_S, _POLL_S = 20.0, 20.0, 0.05
_NAMESPACE = "bench"
# overlayfs is what nodes use; native copies all lower layers for each layer.
_SNAPSHOTTERS = ("overlayfs", "native")


@dataclass(frozen=True, slots=True)
class Containerd:
    """A daemon that runs.

    Attributes:
        pid: of the daemon, whose memory and CPU belong to a pull's.
        root: its content and snapshots.
        snapshotter: the one that works here.
        version: as it says itself.
        prefix: the `ctr` command up to the subcommand.
    """

    pid: int
    root: Path
    snapshotter: str
    version: str
    prefix: tuple[str, ...]

    def pull(self, reference: str) -> list[str]:
        """The command that fetches and unpacks an image from a registry without TLS."""
        options = ["--plain-http", "--snapshotter", self.snapshotter]
        return [*self.prefix, "images", "pull", *options, reference]

    def within(self, reference: str, directory: Path, command: list[str]) -> str:
        """What a command prints while a pulled image is mounted, for it alone, at a directory."""
        directory.mkdir()
        mount = [*self.prefix, "images", "mount", "--snapshotter", self.snapshotter]
        mounting = shlex.join([*mount, reference, str(directory)])
        steps = f"{mounting} >&2 && exec {shlex.join(command)}"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", steps], capture_output=True, text=True, check=False
        )
        directory.rmdir()
        if done.returncode:
            raise RuntimeError(f"the image of ctr cannot be read: {done.stderr[-1000:]}")
        return done.stdout


def why_absent() -> str:
    """Why no daemon can be started here; empty if one can."""
    if lacks := missing_programs("containerd", "ctr", "unshare", "setpriv"):
        return lacks
    if os.geteuid() != 0:
        return "containerd needs root"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if tried.returncode:
        return "containerd needs a mount namespace, which is not allowed here"
    return ""


@contextlib.contextmanager
def containerd(parent: Path) -> Iterator[Containerd]:
    """Run a fresh one, with nothing in it; its directory is removed at the end.

    Raises:
        RuntimeError: it did not start, or has no snapshotter that works; has its log's tail.
    """
    with tempfile.TemporaryDirectory(prefix="containerd-", dir=parent) as name:
        place = Path(name)
        (place / "tmp").mkdir()
        (place / "config.toml").write_text(_config(place), encoding="utf-8")
        # Ends with this process; its mounts with its namespace.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "containerd"]
        with (place / "log").open("wb") as log:
            daemon = subprocess.Popen(
                [*command, "--config", str(place / "config.toml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(place / "tmp")},
            )
        try:
            yield _ready(daemon, place)
        finally:
            daemon.terminate()
            try:
                daemon.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _config(place: Path) -> str:
    # A JSON string is a TOML string.
    path = {key: json.dumps(str(place / key)) for key in ("root", "state", "socket", "opt")}
    return f"""version = 2
root = {path["root"]}
state = {path["state"]}
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = {path["socket"]}
[plugins."io.containerd.internal.v1.opt"]
path = {path["opt"]}
"""


def _ready(daemon: subprocess.Popen[bytes], place: Path) -> Containerd:
    prefix = ("ctr", "--address", str(place / "socket"), "--namespace", _NAMESPACE)
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while (listed := _output(*prefix, "plugins", "ls")) is None:
        if daemon.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"containerd did not start: {_tail(place)}")
        time.sleep(_POLL_S)
    rows = [line.split() for line in listed.splitlines()]
    good = {row[1] for row in rows if "snapshotter" in row[0] and row[-1] == "ok"}
    for snapshotter in _SNAPSHOTTERS:
        if snapshotter in good:
            version = (_output("containerd", "--version") or "").split()
            said = version[2] if len(version) > 2 else ""
            return Containerd(daemon.pid, place / "root", snapshotter, said, prefix)
    raise RuntimeError(f"containerd has no snapshotter that works here: {_tail(place)}")


def _output(*command: str) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _tail(place: Path) -> str:
    return (place / "log").read_bytes()[-1000:].decode(errors="replace")
