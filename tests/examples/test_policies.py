"""The policies of the examples allow what fastload asks of S3, and nothing that it does not ask.

Which requests those are is not read in the code: fastload runs against a real S3 server,
behind a proxy that logs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.cli.main import main
from fastload_common.config import Settings
from fastload_common.source.s3_session import S3Session
from fastload_common.testing.checkpoints import tiny_layers, write_checkpoint
from fastload_common.testing.request_log import LoggingProxy
from fastload_common.testing.s3_server import S3Server
from tests.cases.cache_node import started
from tests.common.compile_cache.artefacts import write_keys
from tests.examples.manifests import BUILDS, build, find, pod_of
from tests.examples.policies import Asked, allowed, asked_of, policy

SETTINGS = find(build("auto-mode"), "ConfigMap")["data"]
"""Where the examples keep things; the policies must speak of the same places."""
MODEL_URI = SETTINGS["MODEL_URI"]
CACHE_URI = SETTINGS["FASTLOAD_COMPILE_CACHE"].split(",")[1]
ROLES = ("reader", "publisher", "prewarm")

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoggingProxy]:
    """The real server under the examples' bucket names; empties them at the end."""
    for name, value in s3_server.environ().items():
        monkeypatch.setenv(name, value)
    client = s3_server.client()
    buckets = [uri.split("/")[2] for uri in (MODEL_URI, CACHE_URI)]
    for bucket in buckets:
        s3_server.make_bucket(bucket)
    with LoggingProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy
    for bucket in buckets:
        for item in client.list_objects_v2(Bucket=bucket).get("Contents", []):
            client.delete_object(Bucket=bucket, Key=item["Key"])


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path)


@pytest.fixture
def role(
    proxy: LoggingProxy, s3_server: S3Server, tmp_path: Path, keys: tuple[Path, Path]
) -> Callable[[str], set[Asked]]:
    """Does what pods of that role do, and says what they asked of S3."""
    write_checkpoint(tmp_path / "model", tiny_layers())
    (tmp_path / "model" / "config.json").write_text("{}")
    bucket, _, prefix = MODEL_URI.removeprefix("s3://").partition("/")
    s3_server.upload_dir(tmp_path / "model", bucket, prefix)

    def do(name: str) -> set[Asked]:
        private, public = keys
        if name != "publisher":
            start("publish", private)
        proxy.clear()
        if name == "prewarm":
            places = f"compile_cache={tmp_path / name},{CACHE_URI}"
            key = f"compile_cache_signing_key_file={public}"
            assert main(["cache", "prewarm", "--all", "--set", places, "--set", key]) == 0
        else:
            assert main(["bench", MODEL_URI, "--json"]) == 0
            start(name, private if name == "publisher" else public)
            # A miss, which looks for the nearest entry.
            start(name, private if name == "publisher" else public, **{"layout.tensor": 8})
        return asked_of(proxy.requests)

    def start(name: str, key: Path, **factors: Any) -> None:
        settings = Settings(
            compile_cache=(str(tmp_path / name / "cache"), CACHE_URI),
            compile_cache_signing_key_file=key,
            compile_cache_deadline_s=60.0,
        )
        started(settings, tmp_path / name / f"start-{len(factors)}", factors)

    return do


@pytest.mark.parametrize("name", ROLES)
def test_what_a_role_asks_is_allowed_and_what_is_allowed_is_asked(
    name: str, role: Callable[[str], set[Asked]]
) -> None:
    asked = role(name)
    used = set()
    for one in asked:
        found = allowed(policy(name), one)
        assert found, f"{name} is not allowed {one}"
        used |= {(sid, one.action) for sid in found}
    granted = {
        (statement["Sid"], action)
        for statement in policy(name)["Statement"]
        for action in _several(statement["Action"])
    }
    assert used == granted, "something is allowed that nobody asks for"


def test_a_reader_may_not_write_and_prewarm_may_not_read_models() -> None:
    blob = Asked("s3:PutObject", _arn(f"{CACHE_URI}/v1/blobs/{'0' * 64}"))
    assert allowed(policy("publisher"), blob) == ["ReadAndWriteCompileCache"]
    assert allowed(policy("reader"), blob) == []
    assert allowed(policy("prewarm"), blob) == []
    shard = Asked("s3:GetObject", _arn(f"{MODEL_URI}/model.safetensors"))
    assert allowed(policy("reader"), shard) == ["ReadModels"]
    assert allowed(policy("prewarm"), shard) == []
    for name in ROLES:
        for uri in (f"{MODEL_URI}/model.safetensors", f"{CACHE_URI}/v1/manifests/0"):
            assert allowed(policy(name), Asked("s3:DeleteObject", _arn(uri))) == []
        other = Asked("s3:GetObject", _arn(f"{MODEL_URI}-2/model.safetensors"))
        assert allowed(policy(name), other) == []


@pytest.mark.parametrize("name", ROLES)
def test_the_cache_is_used_with_no_more_operations_than_the_policies_know(name: str) -> None:
    """The probe for a bucket's region is the one call that they do not allow; its answer names the
    region all the same."""
    source = Path(S3Session.__module__.replace(".", "/")).parent
    text = "".join(
        file.read_text("utf-8")
        for directory in (source, Path("fastload_common/compile_cache/stores"))
        for file in sorted(directory.glob("s3*.py"))
    )
    called = set(
        re.findall(r"""\b((?:get|put|head|list|delete|create|copy)_[a-z_0-9]+)["(]""", text)
    )
    operations = {"head_object", "put_object", "list_objects_v2", "head_bucket", "get_object"}
    assert called & {*operations, "delete_object", "copy_object"} == operations
    bucket = _arn("s3://" + CACHE_URI.split("/")[2])
    assert allowed(policy(name), Asked("s3:ListBucket", bucket)) == []


@pytest.mark.parametrize("name", ROLES)
def test_the_accounts_of_the_pods_are_those_of_the_trust_policies(name: str) -> None:
    account = f"fastload-{name}"
    used = {
        pod["serviceAccountName"]
        for directory in BUILDS
        for manifest in build(directory)
        if (pod := pod_of(manifest)) is not None
    }
    assert account in used
    pod_identity = policy("trust-pod-identity")["Statement"][0]
    tags = pod_identity["Condition"]["StringEquals"]
    assert tags["aws:RequestTag/kubernetes-namespace"] == "fastload"
    assert tags["aws:RequestTag/kubernetes-service-account"] == "fastload-reader"
    assert set(pod_identity["Action"]) == {"sts:AssumeRole", "sts:TagSession"}
    irsa = policy("trust-irsa")["Statement"][0]["Condition"]["StringEquals"]
    assert irsa["OIDC_PROVIDER:sub"] == "system:serviceaccount:fastload:fastload-reader"


def test_only_the_publisher_may_write_whatever_other_policies_say() -> None:
    only, tls = policy("bucket-policy")["Statement"]
    assert {statement["Effect"] for statement in (only, tls)} == {"Deny"}
    assert set(only["Action"]) == {"s3:PutObject", "s3:DeleteObject"}
    assert only["Resource"] == _arn(f"{CACHE_URI}/v1/*")
    (role_arn,) = only["Condition"]["ArnNotEquals"].values()
    assert role_arn.endswith(":role/fastload-publisher")
    assert tls["Resource"][0] in tls["Resource"][1]


def test_blobs_outlive_the_manifests_that_name_them(
    proxy: LoggingProxy, role: Callable[[str], set[Asked]]
) -> None:
    days = {
        rule["Filter"]["Prefix"]: rule["Expiration"]["Days"]
        for rule in policy("life-cycle")["Rules"]
        if rule["Status"] == "Enabled"
    }
    written = {asked.resource for asked in role("publisher") if asked.action == "s3:PutObject"}
    prefix = CACHE_URI.split("/", 3)[3]
    kinds = {f"{prefix}/v1/blobs/", f"{prefix}/v1/manifests/"}
    assert set(days) == kinds
    bucket = _arn("s3://" + CACHE_URI.split("/")[2])
    for kind in kinds:
        assert any(resource.startswith(f"{bucket}/{kind}") for resource in written)
    assert days[f"{prefix}/v1/blobs/"] >= days[f"{prefix}/v1/manifests/"] + 7


def _arn(uri: str) -> str:
    return "arn:aws:s3:::" + uri.removeprefix("s3://")


def _several(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
