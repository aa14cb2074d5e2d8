"""Our signature of a ranged read is botocore's, byte for byte."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from fastload_common.source.http_message import Endpoint
from fastload_common.source.s3_target import S3Target
from fastload_common.source.sigv4 import signed_headers

WALL_S = 1_796_040_000.0  # 2026-11-30


def botocores(
    url: str, headers: dict[str, str], credentials: Credentials, region: str, monkeypatch: Any
) -> dict[str, str]:
    moment = datetime.datetime.fromtimestamp(WALL_S, datetime.UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_: moment, raising=False)
    request = AWSRequest("GET", url, headers=headers)
    request.context["payload_signing_enabled"] = True
    S3SigV4Auth(credentials, "s3", region).add_auth(request)
    return {str(name).lower(): str(value) for name, value in request.headers.items()}


@pytest.mark.parametrize("token", [None, "FwoGZXIvYXdzE//+token=="])
@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_botocore_signs(
    seed: int, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    alphabet = "abcXYZ019-_.~ /+%&=?:@()'!*,;äλ漢"
    key = "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 40)))
    endpoint = draw.choice(
        [
            Endpoint("bucket.s3.eu-west-1.amazonaws.com", 443, True),
            Endpoint("127.0.0.1", draw.randint(1024, 65535), False),
            Endpoint("::1", 9000, False),
        ]
    )
    target = S3Target(endpoint, "/b/", "eu-west-1", "s3", "path", "env", None, 0)
    headers = {"Range": f"bytes={draw.randint(0, 99)}-{draw.randint(100, 10**12)}"}
    if draw.random() < 0.7:
        headers["If-Match"] = f'"{draw.randbytes(16).hex()}-{draw.randint(1, 99)}"'
    secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
    ours = signed_headers(
        target.path(key),
        endpoint.authority,
        headers,
        access_key="AKIDEXAMPLE",
        secret_key=secret,
        token=token,
        region="eu-west-1",
        service="s3",
        wall_s=WALL_S,
    )
    url = f"{endpoint}{target.path(key)}"
    theirs = botocores(
        url, headers, Credentials("AKIDEXAMPLE", secret, token), "eu-west-1", monkeypatch
    )
    assert {name.lower(): text for name, text in ours.items()} == theirs
