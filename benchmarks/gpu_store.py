"""A loopback range server in several processes, and clients that only receive.

It speaks as much of S3 as loaders need: GET with ranges and If-Match, HEAD, ListObjectsV2. Bodies
are sent by ``sendfile`` out of memory, so that it costs little beside what it serves.

    python -m benchmarks.gpu_store serve JSON      (started by `Store`)
    python -m benchmarks.gpu_store receive JSON    (started by `receive_limit`)
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients.run import end_with_parent
from benchmarks.gpu_models import PERIOD_WORDS, File, pattern
from fastload_common.units import MIB

__all__ = ["BUCKET", "Store", "receive_limit"]

BUCKET = "bucket"
_PERIOD_BYTES = 8 * PERIOD_WORDS
_RECEIVED_AT_ONCE_BYTES = 16 * MIB
_RANGE = re.compile(rb"\nrange:\s*bytes=(\d+)-(\d*)", re.IGNORECASE)
_IF_MATCH = re.compile(rb"\nif-match:\s*([^\r\n]+)", re.IGNORECASE)
_ETAG = '"benchmark"'


class Store:
    """Serves files until this process ends or leaves the block.

    Args:
        files: the objects.
        processes: how many serve.

    Attributes:
        port: on 127.0.0.1.
    """

    def __init__(self, files: Sequence[File], processes: int) -> None:
        self._files, self._count = files, processes
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = 0

    def __enter__(self) -> Store:
        self._directory = tempfile.TemporaryDirectory(prefix="fastload-bench-")
        objects = {}
        for file in self._files:
            (Path(self._directory.name) / file.name).write_bytes(file.header)
            objects[file.name] = file.size_bytes
        words = os.memfd_create("fastload-bench-words")
        os.truncate(words, _PERIOD_BYTES)
        with open(words, "wb", closefd=False) as memory:
            memory.write(pattern())
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            self.port = listener.getsockname()[1]
            job = {
                "listener": listener.fileno(),
                "words": words,
                "headers": self._directory.name,
                "objects": objects,
            }
            for _ in range(self._count):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks.gpu_store", "serve", json.dumps(job)],
                        pass_fds=(listener.fileno(), words),
                        stdout=subprocess.PIPE,
                    )
                )
        os.close(words)
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._directory.cleanup()


def receive_limit(
    store: Store, files: Sequence[File], processes: Sequence[int]
) -> dict[str, float]:
    """GiB/s that processes receive which do nothing else, by how many they are."""
    found = {}
    for count in processes:
        jobs = [
            json.dumps(
                {
                    "port": store.port,
                    "objects": [(file.name, file.size_bytes) for file in files],
                    "first": number,
                    "step": count * 2,
                }
            )
            for number in range(0, count * 2, 2)
        ]
        command = [sys.executable, "-m", "benchmarks.gpu_store", "receive"]
        running = [
            subprocess.Popen(
                [*command, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for job in jobs
        ]
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        began_s = time.monotonic()
        for process in running:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        total_bytes = sum(int(process.communicate()[0]) for process in running)
        found[str(count)] = total_bytes / (time.monotonic() - began_s) / 2**30
    return found


# -- in processes of their own ---------------------------------------------------------------


def _serve(job: dict[str, Any]) -> None:
    listener = socket.socket(fileno=job["listener"])
    headers = {name: (Path(job["headers"]) / name).read_bytes() for name in job["objects"]}
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer_all, args=(connection, job, headers), daemon=True).start()


def _answer_all(connection: socket.socket, job: dict[str, Any], headers: dict[str, bytes]) -> None:
    rest = b""
    try:
        while True:
            while (end := rest.find(b"\r\n\r\n")) < 0:
                more = connection.recv(65536)
                if not more:
                    return
                rest += more
            head, rest = rest[:end], rest[end + 4 :]
            _answer(connection, head, job, headers)
    except OSError:
        pass  # the client has gone
    finally:
        connection.close()


def _answer(
    connection: socket.socket, head: bytes, job: dict[str, Any], headers: dict[str, bytes]
) -> None:
    method, target, _ = head.split(b" ", 2)
    parts = urlsplit(target.decode())  # some clients send the whole URL
    path, query = parts.path, parts.query
    name = path.removeprefix(f"/{BUCKET}").strip("/")
    if not name:
        _send(connection, "200 OK", _listing(job["objects"], query), "application/xml")
        return
    if name not in headers:
        _send(connection, "404 Not Found", "<Error><Code>NoSuchKey</Code></Error>", "text/xml")
        return
    if (wanted := _IF_MATCH.search(head)) and wanted[1].decode().strip() != _ETAG:
        _send(connection, "412 Precondition Failed", "<Error/>", "application/xml")
        return
    size_bytes = job["objects"][name]
    start, end = 0, size_bytes
    asked = _RANGE.search(head)
    if asked:
        start = int(asked[1])
        end = min(int(asked[2]) + 1, size_bytes) if asked[2] else size_bytes
    lines = [
        f"HTTP/1.1 {'206 Partial Content' if asked else '200 OK'}",
        "x-amz-request-id: 0123456789ABCDEF",
        f"ETag: {_ETAG}",
        "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT",
        "Accept-Ranges: bytes",
        "Content-Type: binary/octet-stream",
        f"Content-Length: {end - start}",
        *([f"Content-Range: bytes {start}-{end - 1}/{size_bytes}"] if asked else []),
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    if method == b"GET":
        _send_body(connection, headers[name], job["words"], start, end)


def _send_body(connection: socket.socket, header: bytes, words: int, start: int, end: int) -> None:
    if start < len(header):
        connection.sendall(header[start:end])
        start = len(header)
    while start < end:
        offset = (start - len(header)) % _PERIOD_BYTES
        count = min(end - start, _PERIOD_BYTES - offset)
        start += os.sendfile(connection.fileno(), words, offset, count)


def _send(connection: socket.socket, status: str, text: str, kind: str) -> None:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nx-amz-request-id: 0123456789ABCDEF\r\nContent-Type: {kind}\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _listing(objects: dict[str, int], query: str) -> str:
    prefix = dict(part.partition("=")[::2] for part in query.split("&")).get("prefix", "")
    rows = [
        f"<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;benchmark&quot;</ETag><Size>{size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for name, size in objects.items()
        if name.startswith(prefix)
    ]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><MaxKeys>1000</MaxKeys>"
        f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated>"
        + "".join(rows)
        + "</ListBucketResult>"
    )


def _receive(job: dict[str, Any]) -> None:
    """Two connections, each every so-many-th range of all objects, into memory that stays."""
    ranges = [
        (name, start, min(start + _RECEIVED_AT_ONCE_BYTES, size))
        for name, size in job["objects"]
        for start in range(0, size, _RECEIVED_AT_ONCE_BYTES)
    ]
    received = [0, 0]

    def work(number: int) -> None:
        buffer = memoryview(bytearray(_RECEIVED_AT_ONCE_BYTES))
        with socket.create_connection(("127.0.0.1", job["port"])) as connection:
            for name, start, end in ranges[job["first"] + number :: job["step"]]:
                connection.sendall(
                    f"GET /{BUCKET}/{name} HTTP/1.1\r\nHost: x\r\n"
                    f"Range: bytes={start}-{end - 1}\r\n\r\n".encode()
                )
                received[number] += _receive_one(connection, buffer, end - start)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(received), flush=True)


def _receive_one(connection: socket.socket, buffer: memoryview, size_bytes: int) -> int:
    head = b""
    while (end := head.find(b"\r\n\r\n")) < 0:
        head += connection.recv(4096)
    got = len(head) - end - 4
    while got < size_bytes:
        count = connection.recv_into(buffer[got:size_bytes])
        assert count, "the server has gone"
        got += count
    return got


if __name__ == "__main__":
    end_with_parent()
    {"serve": _serve, "receive": _receive}[sys.argv[1]](json.loads(sys.argv[2]))
