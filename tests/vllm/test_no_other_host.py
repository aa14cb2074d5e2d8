"""`vllm serve s3://...` talks to the S3 endpoint and to itself, and to nobody else."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from fastload_common.clock import SystemClock
from fastload_common.testing.s3_server import S3Server, free_port
from fastload_common.testing.tiny_models import write_tiny_model
from fastload_common.testing.vllm_cpu import add_vllm_metadata

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

# Runs at the start of each Python process of the server, spawned ones too. Not of the receivers,
# which see no site-packages: that they ask the endpoint only is tested with a decoy in tests/cases.
SPY = """
import os, sys

def spy(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        what = repr(args[1])
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        what = repr(args[0])
    else:
        return
    line = f"{event} {what}\\n".encode()
    descriptor = os.open(os.environ["SPY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line)
    os.close(descriptor)

sys.addaudithook(spy)
"""

LOOPBACK = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")
START_S = 420.0


def serve_and_ask(model: str, environ: dict[str, str], log: Path) -> str:
    """Start the real server, ask it one completion, stop it."""
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", model),
        *("--load-format", "fastload", "--served-model-name", "tiny", "--enforce-eager"),
        *("--max-model-len", "128", "--host", "127.0.0.1", "--port", str(port)),
    ]
    with log.open("w") as output:
        server = subprocess.Popen(
            command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_up(server, port, log)
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return str(json.load(reply)["usage"]["completion_tokens"])
    finally:
        _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server, and whatever of its session is left."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _wait_until_up(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + START_S
    while clock.monotonic_s() < deadline_s:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            try:
                server.wait(1.0)  # sleeps, and ends early if the server does
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-4000:]}")


@pytest.mark.parametrize("offline", [True, False], ids=["hub offline", "hub not offline"])
def test_no_request_to_any_other_host(
    offline: bool, s3_server: S3Server, s3_bucket: str, tmp_path: Path
) -> None:
    s3_server.upload_dir(write_tiny_model(tmp_path / "model", "qwen3"), s3_bucket, "tiny")
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "sitecustomize.py").write_text(SPY)
    contacts = tmp_path / "contacts.log"
    environ = {
        **os.environ,
        **s3_server.environ(),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Else vLLM looks for its own address by a datagram socket that it connects to a public
        # one (nothing is sent), which the spy could not tell from a request.
        "VLLM_HOST_IP": "127.0.0.1",
        "FASTLOAD_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(
            (str(tmp_path / "spy"), str(add_vllm_metadata(tmp_path / "names")))
        ),
        "SPY_LOG": str(contacts),
    }
    environ.pop("HF_HUB_OFFLINE", None)
    if offline:
        environ["HF_HUB_OFFLINE"] = "1"
    assert serve_and_ask(f"s3://{s3_bucket}/tiny", environ, tmp_path / "server.log") == "4"
    seen = sorted(set(contacts.read_text().splitlines()))
    endpoint_port = s3_server.endpoint.rpartition(":")[2]
    assert any(row.startswith("socket.connect") and endpoint_port in row for row in seen)
    foreign = [row for row in seen if not _is_local(row)]
    assert not foreign


def _is_local(row: str) -> bool:
    what = row.partition(" ")[2]
    if what.startswith(("'/", "b'/", "b'\\x00", "'\\x00", "''", "b''")):
        return True  # a Unix socket
    if what == "None":
        return True  # a socket that is connected already; the spy has seen that, or it is a pair
    return any(f"'{host}'" in what for host in LOOPBACK)
