"""A model of two shards on the real S3 server, seen through a proxy that lies on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastload_common.config import Settings, load_settings
from fastload_common.load.session import LoadSession, WeightSource
from tests.common.load.lying_proxy import LyingProxy
from tests.common.load.session_harness import Model, Weights

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def settings_for(verify: str, **more: str) -> Settings:
    extra = {"progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "1MiB", "verify": verify}
    return load_settings(extra | more, {})


@dataclass
class Stored:
    """Two shards on the server, and the proxy through which the loads see them."""

    uri: str
    proxy: LyingProxy
    client: Any
    bucket: str
    prefix: str
    sizes: dict[str, int]

    def load(
        self,
        settings: Settings,
        model: Model,
        consume: Callable[[Weights], object] | None = None,
    ) -> LoadSession:
        with LoadSession([WeightSource(self.uri)], settings) as session:
            session.load(model, consume or model.load_weights)
        return session

    def data(self, file: str) -> bytes:
        """What is stored, past the proxy."""
        reply = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{file}")
        data: bytes = reply["Body"].read()
        return data

    def counts(self, session: LoadSession) -> tuple[int, int, int, int]:
        """Compared, without checksum, partly read, bytes read for it."""
        found = dict(session.report.verified)
        found.pop("mode")
        return (
            found.pop("compared"),
            found.pop("without_checksum"),
            found.pop("partly_read"),
            found.pop("read_bytes"),
        )


MakeStored = Callable[..., Stored]
"""Uploads the model; its argument is the name of the checksums' algorithm."""
