"""Fixtures of the load tests: one model, in a directory and on the real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.config import Settings, load_settings
from fastload_common.source.base import ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.testing.s3_server import S3Server
from tests.common.load.lying_proxy import LyingProxy
from tests.common.load.metadata_models import forget_entries
from tests.common.load.verify_store import FILES, MakeStored, Stored

SETTINGS = Settings()

MakeSource = Callable[[Path], ObjectSource]


@pytest.fixture(scope="module")
def load_bucket(s3_server: S3Server) -> str:
    """One bucket for a module: the server's room for buckets is small."""
    name = f"b-{uuid.uuid4().hex[:16]}"
    s3_server.make_bucket(name)
    return name


def use_server(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def make_source(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeSource]:
    """From a directory to a source with its files: the directory, or a real server's prefix."""
    opened: list[ObjectSource] = []

    def make(directory: Path) -> ObjectSource:
        uri = str(directory)
        if request.param == "s3":
            server = request.getfixturevalue("s3_server")
            use_server(server, monkeypatch)
            prefix = f"{uuid.uuid4().hex}/model"
            server.upload_dir(directory, request.getfixturevalue("load_bucket"), prefix)
            uri = f"s3://{request.getfixturevalue('load_bucket')}/{prefix}"
        opened.append(open_source(uri, SETTINGS))
        return opened[-1]

    yield make
    for source in opened:
        source.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{k}.weight": torch.randn(30 + k, 16, generator=generator).to(torch.bfloat16)
        for k in range(12)
    }


@pytest.fixture
def directory(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def settings() -> Settings:
    return load_settings({"progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "1MiB"}, {})


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    """Entries are held until the process ends; a test's must not outlive it."""
    yield
    forget_entries()


@pytest.fixture
def large(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of several chunks, and with sizes that are multiples of nothing."""
    generator = torch.Generator().manual_seed(1)
    more = {
        f"wide.{k}": torch.randn(301 + k, 333, generator=generator).to(torch.bfloat16)
        for k in range(4)
    }
    return {**tensors, **more}


@pytest.fixture
def stored_model(
    s3_server: S3Server,
    load_bucket: str,
    tmp_path: Path,
    large: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeStored]:
    """Uploads the model with checksums of one algorithm."""
    use_server(s3_server, monkeypatch)
    with LyingProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

        def make(algorithm: str = "CRC64NVME") -> Stored:
            prefix = uuid.uuid4().hex
            names = sorted(large)
            client = s3_server.client()
            sizes = {}
            for file, part in zip(FILES, (names[::2], names[1::2]), strict=True):
                path = tmp_path / file
                save_file({name: large[name] for name in part}, path)
                body = path.read_bytes()
                client.put_object(
                    Bucket=load_bucket,
                    Key=f"{prefix}/{file}",
                    Body=body,
                    ChecksumAlgorithm=algorithm,
                )
                sizes[file] = len(body)
            uri = f"s3://{load_bucket}/{prefix}"
            return Stored(uri, proxy, client, load_bucket, prefix, sizes)

        yield make
