"""The rig with a model, as the environment's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.rig import Rig
from fastload_common.testing.tunnel_proxy import TunnelProxy
from tests.cases.engine_process import EngineProcess
from tests.cases.harness import MODEL, use
from tests.cases.identity import IdentityService


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
def identity(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[IdentityService]:
    """Issues the only keys that the rig takes; an instance's metadata would answer, too."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    rig.keys.clear()
    with IdentityService(rig) as service:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service.endpoint)
        yield service


@pytest.fixture
def pod(identity: IdentityService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A pod with an identity of its own; the file of its token."""
    token_file = tmp_path / "pod-token"
    token_file.write_text("first-jwt\n")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{identity.endpoint}/pod")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token_file))
    return token_file


ROLE = "arn:aws:iam::123456789012:role/model-reader"


@pytest.fixture
def web_identity(
    identity: IdentityService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """A pod with a role by web identity; the file of its token."""
    token_file = tmp_path / "web-token"
    token_file.write_text("web-jwt")
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token_file))
    return token_file


@pytest.fixture(scope="session")
def engine_store() -> Iterator[Rig]:
    """The store of the engine's process."""
    with Rig() as rig:
        yield rig


@pytest.fixture(scope="session")
def engine(engine_store: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One process with the real vLLM in it, for all cases that need no serving engine."""
    directory = tmp_path_factory.mktemp("engine")
    with EngineProcess(directory, engine_store.environ()) as process:
        yield process
