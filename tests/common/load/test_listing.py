"""Refused listings: when files are asked for by name, and when the refusal itself is the news."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.errors import AccessDeniedError
from fastload_common.load.listing import only_listing_is_denied
from fastload_common.load.metadata import fetch_metadata
from fastload_common.load.open_model import open_checkpoint
from fastload_common.source.registry import open_source
from fastload_common.testing.fault_server import Fault, FaultServer

URI = "s3://bucket/m"


@pytest.fixture
def server(fault_server: FaultServer) -> FaultServer:
    """A server that refuses the key of the environment, with the code that a test appends."""
    fault_server.put("bucket", "m/config.json", b"{}")
    return fault_server


def open_it(cache: Path) -> None:
    settings = Settings()
    open_checkpoint(open_source(URI, settings), settings)


def fetch_it(cache: Path) -> None:
    fetch_metadata(URI, Settings(cache_dir=cache))


@pytest.mark.parametrize("read", [open_it, fetch_it])
@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (400, "ExpiredToken", "session token has expired"),
        (403, "InvalidAccessKeyId", "does not know this access key"),
        (403, "SignatureDoesNotMatch", "the secret key"),
        (403, "RequestTimeTooSkewed", "clock is wrong"),
    ],
)
def test_s13_refused_credentials_are_not_taken_for_a_refused_listing(
    server: FaultServer,
    tmp_path: Path,
    read: Callable[[Path], None],
    status: int,
    code: str,
    hint: str,
) -> None:
    server.script("GET", "bucket", [], then=Fault(status=status, code=code))
    for name in ("config.json", "model.safetensors.index.json"):
        server.script("HEAD", f"bucket/m/{name}", [], then=Fault(status=status))
    with pytest.raises(AccessDeniedError, match=hint) as caught:
        read(tmp_path)
    assert caught.value.fields["code"] == code
    assert server.seen("HEAD") == []


@pytest.mark.parametrize(
    ("fields", "only_listing"),
    [
        ({"status": 403, "code": "AccessDenied"}, True),
        ({"status": 403}, True),
        ({"errno": "EACCES"}, True),
        ({"status": 400, "code": "ExpiredToken"}, False),
        ({"status": 401}, False),
    ],
)
def test_which_refusals_leave_a_way(fields: dict[str, Any], only_listing: bool) -> None:
    assert only_listing_is_denied(AccessDeniedError("no", **fields)) is only_listing
