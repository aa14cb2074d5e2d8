"""What the tests of registries share: a scripted one with one artifact, and a source for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.ranges import ByteRange
from fastload_common.source.oci import OciSource
from fastload_common.source.oci_reference import parse_reference
from fastload_common.testing.fake_clock import FakeClock
from fastload_common.testing.scripted_registry import ScriptedRegistry, ScriptedStorage

DATA = bytes(range(256)) * 100
RAW = "application/vnd.cncf.model.weight.v1.raw"
NAMED = {"org.cncf.model.filepath": "model.safetensors"}
SECRETS = ("s3cr3t-pass", "secret", "Signature", "of-the-test", "c29tZWJvZHk6")

Make = Callable[..., ScriptedRegistry]
Open = Callable[..., OciSource]


@pytest.fixture
def oci_stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def oci_clock() -> FakeClock:
    return FakeClock(auto=True)


@pytest.fixture
def make_registry(oci_stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Starts registries with one artifact ``m:v``, and logs in."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)

    def make_one(*, login: bool = True, **more: Any) -> ScriptedRegistry:
        registry = oci_stack.enter_context(ScriptedRegistry(**more))
        registry.artifact("v", [registry.put(DATA, RAW, NAMED)])
        if login:
            (tmp_path / "config.json").write_text(json.dumps(registry.login()))
        return registry

    return make_one


@pytest.fixture
def without_ranges(make_registry: Make, open_oci: Open) -> tuple[ScriptedRegistry, OciSource]:
    """A registry that serves whole blobs only, and a source in front of it."""
    registry = make_registry()
    registry.honours_ranges = False
    return registry, open_oci(registry)


@pytest.fixture
def storage(oci_stack: ExitStack, oci_clock: FakeClock) -> ScriptedStorage:
    made = oci_stack.enter_context(ScriptedStorage())
    made.stamp = stamp(oci_clock)
    return made


@pytest.fixture
def open_oci(oci_stack: ExitStack, oci_clock: FakeClock) -> Open:
    def open_one(
        registry: ScriptedRegistry, name: str = "m:v", *plain: Any, **more: Any
    ) -> OciSource:
        hosts = () if registry.endpoint.startswith("https") else (registry.host,)
        hosts += tuple(one.host for one in plain)
        settings = Settings(**{"max_attempts": 3, "oci_plain_http": hosts or None} | more)
        source = OciSource(parse_reference(f"oci://{registry.host}/{name}"), settings, oci_clock)
        return oci_stack.enter_context(closing(source))

    return open_one


def stamp(clock: FakeClock) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(clock.wall_s()))


def read(source: OciSource, start: int = 1000, end: int = 2000) -> bytes:
    return source.read(source.stat("model.safetensors"), ByteRange(start, end))


def assert_no_secret(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    shown = f"{error!r} {error} {caplog.text} {getattr(error, 'fields', '')}"
    assert not [secret for secret in SECRETS if secret in shown]
