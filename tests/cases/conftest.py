"""The rig with a model, as the environment's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import Rig
from tests.cases.harness import MODEL, use
from tests.cases.proxy import TunnelProxy


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with Rig() as rig:
        MODEL.put(rig)
        use(rig, monkeypatch)
        yield rig


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> PrivateAuthority:
    return PrivateAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def tls_rig(monkeypatch: pytest.MonkeyPatch, authority: PrivateAuthority) -> Iterator[Rig]:
    """The same over TLS; nobody is told of its authority."""
    names = ("127.0.0.1", "localhost", "s3.local", "*.s3.local", "*.s3.amazonaws.com")
    context = authority.server_context(*names, "s3.us-east-1.amazonaws.com", "s3.amazonaws.com")
    with Rig(tls=context, domains=("s3.local",)) as rig:
        MODEL.put(rig)
        use(rig, monkeypatch)
        yield rig


@pytest.fixture
def proxy() -> Iterator[TunnelProxy]:
    with TunnelProxy() as proxy:
        yield proxy


WriteConfig = Callable[[str, str], None]


@pytest.fixture
def aws_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
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
