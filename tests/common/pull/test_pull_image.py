"""Images of a real registry: what is pulled is what `umoci unpack` makes of it."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload_common.cli.main import main
from fastload_common.config import Settings
from fastload_common.pull.pull import pull
from fastload_common.testing.certificates import PrivateAuthority
from fastload_common.testing.registry_server import RegistryServer, missing_programs
from tests.common.pull.images import (
    Entry,
    archive,
    directory,
    file,
    link,
    push_layers,
    symlink,
    tree_of,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryServer]:
    if lacks := missing_programs("docker-registry", "skopeo", "umoci"):
        pytest.skip(lacks)
    authority = PrivateAuthority(tmp_path_factory.mktemp("authority"))
    with RegistryServer(authority) as running:
        yield running


@pytest.fixture(autouse=True)
def environ(registry: RegistryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in registry.environ().items():
        monkeypatch.setenv(name, value)


def rich_layers() -> list[bytes]:
    """Every kind of thing that layers of operating systems have, and some that are odd."""
    return [archive(*lowest()), archive(*second()), archive(*third())]


def lowest() -> list[Entry]:
    noise = random.Random(1)
    return [
        directory("./"),
        directory("etc/", 0o755),
        file("etc/passwd", b"root:x:0:0\n", mode=0o644),
        file("etc/shadow", b"secret", mode=0o640, gid=42),
        directory("usr/"),
        directory("usr/bin/"),
        file("usr/bin/su", noise.randbytes(200_000), mode=0o4755),
        file("usr/bin/tool", noise.randbytes(3_000_000), mode=0o755, uid=1000, gid=1000),
        link("usr/bin/tool-too", "usr/bin/tool"),
        symlink("bin", "usr/bin"),
        symlink("etc/mtab", "/proc/self/mounts"),
        symlink("etc/far", "../../../../somewhere"),
        directory("var/"),
        directory("var/lib/", mtime_s=1_600_000_000.25),
        file("var/lib/one", b"1"),
        file("var/lib/two", b"2"),
        directory("var/cache/"),
        file("var/cache/a", b"a"),
        file("var/cache/b/c", b"c"),
        directory("tmp/", 0o1777),
        file("opt/" + "long/" * 25 + "n" * 200, b"long"),
        file("srv-umlaut-\u00e4\u20ac", b"utf-8", mtime_s=1_500_000_000.5),
        file("gone/file", b"gone"),
        file("was-file", b"file"),
        directory("was-directory/"),
        file("was-directory/x", b"x"),
        symlink("was-link", "etc/passwd"),
        file("empty", b""),
    ]


def second() -> list[Entry]:
    return [
        directory("var/lib/", mtime_s=1_650_000_000),
        file("var/lib/.wh.one", b""),
        file("var/lib/three", b"3"),
        directory("var/cache/"),
        file("var/cache/.wh..wh..opq", b""),
        file("var/cache/new", b"new"),
        file(".wh.gone", b""),
        directory("was-file/"),
        file("was-file/now", b"directory"),
        file("was-directory", b"file now"),
        file("was-link", b"no link now"),
        file("bin/through-link", b"in usr/bin"),
        link("usr/bin/tool-late", "usr/bin/tool"),
        file("etc/passwd", b"root:x:0:0\nuser:x:1000:1000\n", uid=3, gid=4),
        Entry("etc/attributes", b"x", pax={"SCHILY.xattr.user.test": "value"}),
    ]


def third() -> list[Entry]:
    return [
        directory("gone/"),
        file("gone/again", b"back"),
        directory("tmp/", 0o1777, mtime_s=1_610_000_000),
        symlink("usr/bin/tool-too", "tool"),
        file("var/lib/.wh.not-there", b""),
    ]


def umoci_tree(registry: RegistryServer, repository: str, tmp_path: Path) -> Path:
    layout, out = tmp_path / "layout", tmp_path / "umoci"
    source = f"docker://{registry.host}/{repository}:latest"
    login = f"--src-creds={registry.user}:{registry.password}"
    copy = ["skopeo", "copy", "--quiet", "--src-tls-verify=false", login, source]
    subprocess.run([*copy, f"oci:{layout}:latest"], check=True, capture_output=True)
    unpack = ["umoci", "raw", "unpack", "--image", f"{layout}:latest", str(out)]
    subprocess.run(unpack, check=True, capture_output=True)
    return out


@needs_root
@pytest.mark.parametrize("how", ["gzip", "zstd", "none"])
def test_the_tree_is_what_umoci_makes(registry: RegistryServer, tmp_path: Path, how: str) -> None:
    repository = f"images/{how}"
    push_layers(registry, repository, rich_layers(), [how])
    destination = tmp_path / "pulled"
    uri = f"oci://{registry.host}/{repository}"
    report = pull(uri, destination, Settings(), special="keep")
    assert report.layers == report.compared == 3
    if how == "zstd":
        # This umoci knows no zstd; the layers are those of the others.
        repository = "images/zstd-peer"
        push_layers(registry, repository, rich_layers(), ["gzip"])
    mine, theirs = tree_of(destination), tree_of(umoci_tree(registry, repository, tmp_path))
    # Directories without an entry get their time when they are made, and so does umoci's root.
    for name in (".", *(name for name in mine if name.startswith("opt") and "n" * 9 not in name)):
        mine[name], theirs[name] = mine[name][:-1], theirs[name][:-1]
    assert set(mine) == set(theirs)
    differ = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    assert differ == {}
    assert not list(tmp_path.glob(".fastload-pull-*"))


def test_the_command_pulls_an_image(
    registry: RegistryServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push_layers(registry, "images/command", rich_layers())
    destination = tmp_path / "pulled"
    uri = f"oci://{registry.host}/images/command"
    assert main(["pull", uri, str(destination)]) == 2
    said = capsys.readouterr().err
    assert "ArchiveUnsafeError" in said
    assert "'usr/bin/su' has the set-user-ID bit" in said
    assert "--special keep" in said
    assert not destination.exists()
    assert main(["pull", uri, str(destination), "--special", "drop"]) == 0
    assert (destination / "usr/bin/su").stat().st_mode & 0o7777 == 0o755
    assert "3 layers" in capsys.readouterr().out
