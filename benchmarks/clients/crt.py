"""awscrt's `S3Client`: one GET per object, which it splits itself; parts copied as they come."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from benchmarks.work import BUCKET, Item, Work, check
from fastload_common.config import environment

_GBPS = 100.0


class CrtClient:
    """Parts of the chunk size, connections as asked for, target throughput out of the way."""

    def __init__(self, work: Work) -> None:
        from awscrt import auth, http, io, s3

        self._http, self._s3 = http, s3
        environ = environment()
        url = urlsplit(environ["AWS_ENDPOINT_URL"])
        self._host = url.netloc
        loops = io.EventLoopGroup()
        bootstrap = io.ClientBootstrap(loops, io.DefaultHostResolver(loops))
        provider = auth.AwsCredentialsProvider.new_static(
            environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"]
        )
        signing = s3.create_default_s3_signing_config(
            region=environ["AWS_REGION"], credential_provider=provider
        )
        tls: dict[str, Any] = {"tls_mode": s3.S3RequestTlsMode.DISABLED}
        if url.scheme == "https":
            options = io.TlsContextOptions()
            options.override_default_trust_store_from_path(None, environ["AWS_CA_BUNDLE"])
            connection = io.ClientTlsContext(options).new_connection_options()
            tls = {
                "tls_mode": s3.S3RequestTlsMode.ENABLED,
                "tls_connection_options": connection,
            }
        self._client = s3.S3Client(
            bootstrap=bootstrap,
            region=environ["AWS_REGION"],
            signing_config=signing,
            part_size=work.chunk_bytes,
            throughput_target_gbps=_GBPS,
            max_active_connections_override=work.connections,
            **tls,
        )

    def receive(self, items: tuple[Item, ...]) -> int:
        bodies = [_Body() for _ in items]
        requests = []
        for item, body in zip(items, bodies, strict=True):
            headers = self._http.HttpHeaders([("Host", self._host)])
            request = self._http.HttpRequest("GET", f"/{BUCKET}/{item.name}", headers)
            kind = self._s3.S3RequestType.GET_OBJECT
            requests.append(self._client.make_request(type=kind, request=request, on_body=body))
        for request in requests:
            request.finished_future.result()
        return sum(body.size_bytes for body in bodies)

    def close(self) -> None:
        del self._client


class _Body:
    """Copies the parts of one object into memory that is re-used, and checks them there.

    A part is a `bytes` of awscrt; a loader wants it in memory of its own, as the others give.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.size_bytes = 0

    def __call__(self, chunk: bytes, offset: int, **_: object) -> None:
        if len(self._buffer) < len(chunk):
            self._buffer = bytearray(len(chunk))
        self._buffer[: len(chunk)] = chunk
        check(memoryview(self._buffer)[: len(chunk)], offset)
        self.size_bytes += len(chunk)


def open_client(work: Work) -> CrtClient:
    return CrtClient(work)
