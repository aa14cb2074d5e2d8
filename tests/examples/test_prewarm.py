"""The prewarm DaemonSet's containers, run as their users: what they leave fits the engines."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.testing.s3_server import S3Server
from tests.cases.cache_node import started
from tests.common.compile_cache.artefacts import write_keys
from tests.examples.manifests import build, containers_of, find, pod_of
from tests.house.tree import ROOT

# As root it does all once, so that everything is imported: the user cannot read root's files.
AS_USER = """
import os, sys
from pathlib import Path
from fastload_common.cli.main import main
from fastload_common.clock import SystemClock
from fastload_common.config import load_settings
from fastload_common.range_cache.place import CacheDirectory
words, user, scratch = sys.argv[3:], int(sys.argv[1]), sys.argv[2]
aside = ["--set", f"compile_cache={scratch},{os.environ['FASTLOAD_COMPILE_CACHE'].split(',')[1]}"]
assert main([*words, *aside]) == 0
settings = load_settings({}, extra_name="")
os.setgroups([])
os.setgid(user)
os.setuid(user)
code = main(words)
ranges = CacheDirectory(settings.node_cache, settings.node_cache_max_bytes, SystemClock())
ranges.open()
print("ranges:", ranges.why_not_writable or "writable")
sys.exit(code)
"""

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif(os.geteuid() != 0, reason="takes the part of several users"),
]


@pytest.fixture
def node() -> Iterator[Path]:
    """The node's directory, as the kubelet makes it."""
    place = Path(tempfile.mkdtemp(prefix="fastload-node-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def containers() -> dict[str, dict[str, Any]]:
    pod = pod_of(find(build("karpenter-bottlerocket"), "DaemonSet")) or {}
    return {container["name"]: container for container in containers_of(pod)}


def make_directories(node: Path) -> None:
    found = containers()["directories"]
    words = [word.replace("/node", str(node)) for word in found["command"] + found["args"]]
    # With the capabilities of its container and no others, where that can be had.
    added = found["securityContext"]["capabilities"]["add"]
    bounds = ",".join(["-all", *(f"+{name.lower()}" for name in added)])
    limited = ["setpriv", f"--bounding-set={bounds}"] if shutil.which("setpriv") else []
    subprocess.run([*limited, *words], check=True, timeout=60)


def test_the_directories_belong_to_the_engines_user_and_to_nobody_else(node: Path) -> None:
    for _ in range(2):  # the node is restarted: it must be right again
        make_directories(node)
        for name in ("compile", "ranges"):
            found = (node / name).stat()
            assert (found.st_uid, found.st_gid) == (10001, 10001)
            assert stat.S_IMODE(found.st_mode) == 0o755
            (node / name).chmod(0o777)


def test_prewarm_fills_the_directory_as_the_engines_user(
    node: Path, tmp_path: Path, s3_bucket: str, s3_server: S3Server
) -> None:
    uri = f"s3://{s3_bucket}/prod"
    private, public = write_keys(tmp_path)
    shutil.copy(public, node / "key.pem")
    (node / "key.pem").chmod(0o644)
    publisher = Settings(
        compile_cache=(str(tmp_path / "publisher"), uri),
        compile_cache_signing_key_file=private,
        compile_cache_deadline_s=60.0,
    )
    started(publisher, tmp_path / "start", {})
    make_directories(node)
    prewarm = containers()["prewarm"]
    environ = {
        **{key: value for key, value in os.environ.items() if key.startswith("AWS_")},
        **s3_server.environ(),
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "FASTLOAD_COMPILE_CACHE": f"{node / 'compile'},{uri}",
        "FASTLOAD_COMPILE_CACHE_SIGNING_KEY_FILE": str(node / "key.pem"),
        "FASTLOAD_NODE_CACHE": str(node / "ranges"),
    }
    user = str(prewarm["securityContext"]["runAsUser"])
    done = subprocess.run(
        [sys.executable, "-c", AS_USER, user, str(tmp_path / "scratch"), *prewarm["args"]],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("copied") == 2, done.stdout
    assert done.stdout.endswith("ranges: writable\n")
    entries = list((node / "compile" / "v1" / "entries").iterdir())
    assert len(entries) == 1
    assert {path.stat().st_uid for path in (node / "compile").rglob("*")} == {10001}
    reader = Settings(compile_cache=(str(node / "compile"),), compile_cache_signing_key_file=public)
    assert started(reader, tmp_path / "reader", {}).status == "hit"
