"""As much of IAM as the examples use, and which action a request to S3 is. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import parse_qs

from fastload_common.testing.request_log import LoggedRequest
from tests.examples.manifests import EXAMPLES

__all__ = ["Asked", "allowed", "asked_of", "policy"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks of IAM."""

    action: str
    resource: str
    prefix: str | None = None


def policy(name: str) -> dict[str, Any]:
    """One of the examples' policies."""
    found: dict[str, Any] = json.loads((EXAMPLES / "iam" / f"{name}.json").read_text("utf-8"))
    return found


def asked_of(requests: Iterable[LoggedRequest]) -> set[Asked]:
    """The actions of logged requests, by the table in the S3 user guide of required permissions."""
    return {_asked(request) for request in requests}


def _asked(request: LoggedRequest) -> Asked:
    bucket, _, key = request.path.removeprefix("/").partition("/")
    if not key:
        assert request.method in ("GET", "HEAD"), request
        prefix = parse_qs(request.query).get("prefix", [None])[0]
        return Asked("s3:ListBucket", f"arn:aws:s3:::{bucket}", prefix)
    action = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "PUT": "s3:PutObject"}[request.method]
    return Asked(action, f"arn:aws:s3:::{bucket}/{key}")


def allowed(found: dict[str, Any], asked: Asked) -> list[str]:
    """The statements that allow it, by their Sid; none: it is denied."""
    return [statement["Sid"] for statement in found["Statement"] if _allows(statement, asked)]


def _allows(statement: dict[str, Any], asked: Asked) -> bool:
    assert statement["Effect"] == "Allow"
    if asked.action not in _several(statement["Action"]):
        return False
    if not any(fnmatchcase(asked.resource, name) for name in _several(statement["Resource"])):
        return False
    condition = statement.get("Condition", {})
    assert set(condition) <= {"StringLike"}
    for key, patterns in condition.get("StringLike", {}).items():
        assert key == "s3:prefix"
        if asked.prefix is None:
            return False
        if not any(fnmatchcase(asked.prefix, pattern) for pattern in _several(patterns)):
            return False
    return True


def _several(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
