"""A real OCI registry on loopback: Debian's `docker-registry`, with basic auth over TLS.

For tests and benchmarks. Everything that it writes lies in one temporary directory; it ends with
its owner, however that one ends, because it hangs on a pipe that the owner holds.

    with RegistryServer(PrivateAuthority(directory)) as registry:
        layer = registry.push_blob("models/tiny", data, MEDIA_TYPE, {TITLE: "model.safetensors"})
        registry.push_manifest("models/tiny", "latest", [layer])
        subprocess.run([...], env={**os.environ, **registry.environ()})   # oci://<host>/models/tiny

`skopeo` and `umoci` make images; see `push_image`. All three programs come from Debian.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from fastload_common.clock import SystemClock
from fastload_common.config import environment
from fastload_common.errors import ConfigError, SourceUnavailableError
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.s3_server import free_port
from fastload_common.testing.server_process import end_server

__all__ = [
    "FILEPATH",
    "TITLE",
    "LoggedRequest",
    "RegistryServer",
    "descriptor",
    "missing_programs",
]

TITLE = "org.opencontainers.image.title"
FILEPATH = "org.cncf.model.filepath"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"

_START_DEADLINE_S = 30.0
_POLL_S = 0.05
_USER, _PASSWORD = "puller", "not-a-secret"
# bcrypt of the password; the server takes nothing else, and Python has no bcrypt.
_HASH = "$2y$05$fastloadfastloadfastleMAJQ/asnCgoIploD/U3ZcdiqSpdgeuq"
_KEEPER = '( "$@" </dev/null; kill -TERM 0 ) & cat >/dev/null; kill -KILL 0'
# The combined form: address, user, time, request, status, body bytes.
_LOGGED = re.compile(rb'"(GET|HEAD) (\S+) HTTP/[0-9.]+" (\d{3}) (\d+) ')


def missing_programs(*names: str) -> str:
    """What must be installed first, as one sentence; empty if all is there."""
    absent = [name for name in names or ("docker-registry",) if shutil.which(name) is None]
    return f"needs {', '.join(absent)}: apt-get install {' '.join(absent)}" if absent else ""


def descriptor(
    data: bytes, media_type: str, annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A descriptor as manifests hold it."""
    found: dict[str, Any] = {
        "mediaType": media_type,
        "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
        "size": len(data),
    }
    if annotations:
        found["annotations"] = dict(annotations)
    return found


class LoggedRequest:
    """One line of the server's log."""

    def __init__(self, method: str, path: str, status: int, body_bytes: int) -> None:
        self.method, self.path, self.status, self.body_bytes = method, path, status, body_bytes

    def __repr__(self) -> str:
        return f"{self.method} {self.path} {self.status} {self.body_bytes}"


class RegistryServer:
    """One server. Use as a context manager, or call `start` and `stop`.

    Args:
        authority: signs its certificate; None: plain HTTP.
        auth: whether it wants `user` and `password`.
        environment_extra: further ``REGISTRY_*`` settings of the server.

    Attributes:
        host: ``127.0.0.1:port``, as it stands in references; once started.
        user, password: fixed, and no secret.
    """

    user, password = _USER, _PASSWORD

    def __init__(
        self,
        authority: PrivateAuthority | None,
        *,
        auth: bool = True,
        environment_extra: Mapping[str, str] | None = None,
    ) -> None:
        self._authority = authority
        self._auth = auth
        self._extra = dict(environment_extra or {})
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._clock = SystemClock()
        self.host = ""

    def __enter__(self) -> RegistryServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def directory(self) -> Path:
        """Where its files are; removed by `stop`."""
        assert self._directory is not None, "not started"
        return self._directory

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ConfigError: the program is not installed.
            SourceUnavailableError: it ended or did not answer in time; has its log's tail.
        """
        if lacks := missing_programs():
            raise ConfigError(f"no registry can be started: {lacks}")
        directory = self._directory = Path(tempfile.mkdtemp(prefix="fastload-registry-"))
        try:
            port = free_port()
            self.host = f"127.0.0.1:{port}"
            with (directory / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _KEEPER, "sh", "docker-registry", "serve", "config.yml"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=directory,
                    env={
                        "PATH": environment().get("PATH", "/usr/bin:/bin"),
                        "HOME": str(directory),
                        **self._settings(directory),
                        **self._extra,
                    },
                    start_new_session=True,
                )
            self._write_login(directory)
            self._wait_until_ready(port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its directory. May be called twice."""
        process, self._process = self._process, None
        directory, self._directory = self._directory, None
        end_server(process, directory)

    def environ(self) -> dict[str, str]:
        """The variables by which fastload finds its certificate authority and its credentials."""
        found = {"DOCKER_CONFIG": str(self.directory / "login")}
        if self._authority is not None:
            found["AWS_CA_BUNDLE"] = str(self._authority.bundle)
        else:
            found["FASTLOAD_OCI_PLAIN_HTTP"] = self.host
        return found

    # What is in it

    def push_blob(
        self,
        repository: str,
        data: bytes,
        media_type: str,
        annotations: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Store a blob; its descriptor."""
        found = descriptor(data, media_type, annotations)
        begun = self._call("POST", f"/v2/{repository}/blobs/uploads/")
        where = urlsplit(begun.getheader("Location") or "")
        path = f"{where.path}?{where.query}&digest={found['digest']}"
        self._call("PUT", path, data, "application/octet-stream")
        return found

    def push_manifest(
        self,
        repository: str,
        tag: str,
        layers: Sequence[Mapping[str, Any]],
        *,
        config: Mapping[str, Any] | None = None,
        artifact_type: str = "",
        annotations: Mapping[str, str] | None = None,
    ) -> str:
        """Store a manifest under a tag; its digest. Without a config an empty one is stored."""
        config = config or self.push_blob(repository, b"{}", EMPTY)
        document: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": dict(config),
            "layers": [dict(layer) for layer in layers],
        }
        if artifact_type:
            document["artifactType"] = artifact_type
        if annotations:
            document["annotations"] = dict(annotations)
        return self.push_document(repository, tag, document)

    def push_document(
        self, repository: str, tag: str, document: Mapping[str, Any], media_type: str = ""
    ) -> str:
        """Store a manifest or an index as it is; its digest."""
        data = json.dumps(document).encode()
        media_type = media_type or str(document["mediaType"])
        self._call("PUT", f"/v2/{repository}/manifests/{tag}", data, media_type)
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def push_image(
        self, layout: Path, repository: str, tag: str, *, decompress: bool = False
    ) -> None:
        """Copy a tag of an OCI layout on disk (made by umoci) to the registry, by skopeo.

        Args:
            decompress: store plain tar layers; umoci itself makes gzip ones.
        """
        command = ["skopeo", "copy", "--quiet", f"--dest-creds={_USER}:{_PASSWORD}"]
        command += ["--dest-tls-verify=false", "--preserve-digests"]
        source, target = f"oci:{layout}:{tag}", f"docker://{self.host}/{repository}:{tag}"
        with tempfile.TemporaryDirectory(dir=self.directory) as plain:
            if decompress:
                first = ["skopeo", "copy", "--quiet", "--dest-decompress", source, f"dir:{plain}"]
                _run(first)
                source = f"dir:{plain}"
            _run([*command, source, target])

    @staticmethod
    def run(*command: str) -> None:
        """Run one of the programs; an error has what it said."""
        _run(command)

    # What was asked

    def log_text(self) -> bytes:
        """All that it has logged."""
        return (self.directory / "log").read_bytes()

    def requests(self, since: int = 0) -> list[LoggedRequest]:
        """GETs and HEADs with the bytes of their replies, after so many bytes of the log."""
        return [
            LoggedRequest(m[0].decode(), m[1].decode(), int(m[2]), int(m[3]))
            for m in _LOGGED.findall(self.log_text()[since:])
        ]

    # The rest

    def _settings(self, directory: Path) -> dict[str, str]:
        settings: dict[str, Any] = {
            "version": "0.1",
            "log": {"level": "warn", "accesslog": {"disabled": False}},
            "storage": {
                "filesystem": {"rootdirectory": str(directory / "data"), "maxthreads": 100},
                "delete": {"enabled": True},
            },
            "http": {"addr": self.host},
        }
        if self._authority is not None:
            file = str(self._authority.server_file("127.0.0.1", "localhost"))
            settings["http"]["tls"] = {"certificate": file, "key": file}
        if self._auth:
            (directory / "htpasswd").write_text(f"{_USER}:{_HASH}\n")
            settings["auth"] = {"htpasswd": {"realm": "test", "path": str(directory / "htpasswd")}}
        # JSON is YAML.
        (directory / "config.yml").write_text(json.dumps(settings))
        return {"OTEL_TRACES_EXPORTER": "none"}

    def _write_login(self, directory: Path) -> None:
        (directory / "login").mkdir()
        auth = base64.b64encode(f"{_USER}:{_PASSWORD}".encode()).decode()
        auths = {self.host: {"auth": auth}} if self._auth else {}
        (directory / "login" / "config.json").write_text(json.dumps({"auths": auths}))

    def _connection(self) -> http.client.HTTPConnection:
        if self._authority is None:
            return http.client.HTTPConnection(self.host, timeout=60)
        context = ssl.create_default_context(cafile=str(self._authority.bundle))
        return http.client.HTTPSConnection(self.host, timeout=60, context=context)

    def _call(
        self, method: str, path: str, body: bytes = b"", media_type: str = ""
    ) -> http.client.HTTPResponse:
        headers = {"Content-Length": str(len(body))}
        if media_type:
            headers["Content-Type"] = media_type
        if self._auth:
            pair = base64.b64encode(f"{_USER}:{_PASSWORD}".encode()).decode()
            headers["Authorization"] = f"Basic {pair}"
        connection = self._connection()
        try:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        if not 200 <= reply.status < 300:
            raise SourceUnavailableError(
                f"the test registry answered {reply.status} to {method} {path.partition('?')[0]}: "
                f"{text[:500]!r}"
            )
        return reply

    def _wait_until_ready(self, port: int) -> None:
        assert self._process is not None
        deadline_s = self._clock.monotonic_s() + _START_DEADLINE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            ended = self._process.poll() is not None
            if ended or self._clock.monotonic_s() > deadline_s:
                tail = self.log_text()[-2000:].decode(errors="replace")
                raise SourceUnavailableError(f"the test registry did not start: {tail}")
            self._clock.wait(threading.Event(), _POLL_S)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise SourceUnavailableError(f"{command[0]} failed: {done.stderr[-1000:]}")
