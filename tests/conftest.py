"""Fixtures for all tests: a clean environment and the real S3 server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings as hypothesis_settings

from fastload_common.testing.fault_server import FaultServer
from fastload_common.testing.s3_server import S3Server

_FOREIGN = ("AWS_", "FASTLOAD_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_")

# The same examples in every run, and no clock: a busy machine must not fail a test.
hypothesis_settings.register_profile("fastload", deadline=None, derandomize=True)
hypothesis_settings.load_profile("fastload")


@pytest.fixture(autouse=True)
def _no_foreign_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Keep the caller's AWS, proxy and fastload settings out of every test."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    nowhere = tmp_path_factory.getbasetemp() / "no-aws"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nowhere / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One real S3 server for the whole test run."""
    with S3Server() as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new empty bucket, and the variables by which every client in this test finds it."""
    for name, value in s3_server.environ().items():
        monkeypatch.setenv(name, value)
    bucket = f"b-{uuid.uuid4().hex[:16]}"
    s3_server.make_bucket(bucket)
    return bucket


@pytest.fixture
def aws_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes the shared config and credentials files."""

    def write(config: str, credentials: str = "") -> None:
        for variable, text in (
            ("AWS_CONFIG_FILE", config),
            ("AWS_SHARED_CREDENTIALS_FILE", credentials),
        ):
            file = tmp_path / variable
            file.write_text(text)
            monkeypatch.setenv(variable, str(file))

    return write


@pytest.fixture
def fault_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    """The scripted server, as the environment's S3 endpoint, with keys in the environment."""
    with FaultServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
        yield server
