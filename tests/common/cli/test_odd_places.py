"""The program where containers put it: a user without a name or home, nothing writable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMELESS_USER = "1000680000"
UNSHARE = ["unshare", "--user", f"--map-user={NAMELESS_USER}", "--map-group=0"]
# As the root of a mount namespace of our own; the machine's mounts stay as they are.
READ_ONLY = ["unshare", "--mount", "sh", "-c", 'mount -o bind,remount,ro / && exec "$@"', "sh"]
ENVIRON = ["env", "-i", "HOME=/", "PATH=/usr/bin:/bin"]


def works(*prefix: str) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    return subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0


def run(prefix: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *ENVIRON, sys.executable, "-m", "fastload_common.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not works(*UNSHARE), reason="user namespaces are not allowed here")
def test_e01_a_random_user_without_a_name_or_a_home(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    nameless = run(UNSHARE, "doctor", str(tmp_path), "--json")
    assert nameless.returncode == 0, nameless.stdout + nameless.stderr
    assert "fail" not in {check["status"] for check in json.loads(nameless.stdout)}
    done = run(UNSHARE, "bench", str(tmp_path), "--json")
    assert json.loads(done.stdout)["size_bytes"] == 1000, done.stderr


@pytest.mark.skipif(not works(*UNSHARE), reason="user namespaces are not allowed here")
def test_e01_the_entry_point_needs_no_user_either() -> None:
    code = "import os, fastload_vllm; print(os.getuid())"
    done = subprocess.run(
        [*UNSHARE, *ENVIRON, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == NAMELESS_USER, done.stderr


@pytest.mark.skipif(not works(*READ_ONLY), reason="mount namespaces are not allowed here")
def test_e03_a_root_file_system_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    done = run(READ_ONLY, "bench", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["size_bytes"] == 1000
    cache = f"cache_dir={tmp_path / 'cache'}"
    doctor = run(READ_ONLY, "doctor", str(tmp_path), "--json", "--set", cache)
    checks = {check["name"]: check for check in json.loads(doctor.stdout)}
    # Where the temporary directory is a mount of its own it stays writable.
    writable = checks["cache directory"]["status"] == "ok"
    assert writable or "cannot be written" in checks["cache directory"]["found"]


def test_closed_standard_output_is_one_line() -> None:
    done = run(["sh", "-c", 'exec "$@" >&-', "sh"], "config")
    assert done.returncode == 2
    assert done.stderr == ("fastload: standard output is closed: there is nowhere to print to\n")
