"""Who may put code into the directory of the compile cache, and what a disk may refuse."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fastload_common.clock import SystemClock
from fastload_common.compile_cache.lifecycle import CompileCache
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.unpack import unpack
from fastload_common.config import Settings
from fastload_common.errors import BundleUntrustedError, ConfigError, StoreUnsafeError
from tests.cases.cache_node import BOUND_BYTES, Node, warnings, worker
from tests.common.compile_cache.artefacts import FACTORS, TREES, package, write_keys, write_trees

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# C16: others


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777, 0o2775])
@pytest.mark.parametrize("level", [".", "v1", "v1/entries"])
def test_c16_a_directory_that_others_can_write_is_not_used(
    node: Node, mode: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.start()
    (node.cache / level).chmod(mode)
    outcome = node.start()
    assert outcome.status == "miss"
    assert "can be written by others" in outcome.reason
    assert outcome.published[str(node.cache)].startswith("StoreUnsafeError")
    assert len(warnings(caplog)) == 1
    forced = Node(node.cache.parent / "other", compile_cache_force=True)
    forced.settings = Settings(compile_cache=(str(node.cache),), compile_cache_force=True)
    assert forced.start().status == "hit"


def test_c16_nor_one_whose_parent_lets_others_replace_it(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    store = NodeStore(parent / "cache", max_bytes=BOUND_BYTES)
    store.put(package(write_trees(tmp_path / "a")))
    parent.chmod(0o777)
    with pytest.raises(StoreUnsafeError, match="can be replaced"):
        store.keys()
    parent.chmod(0o1777)
    assert len(store.keys()) == 1


@needs_root
def test_c16_nor_one_of_another_user(node: Node) -> None:
    node.start()
    os.chown(node.cache, 12345, 12345)
    assert "belongs to user 12345" in node.start().reason


def test_c16_with_a_key_only_what_it_signed_is_used_even_where_others_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = write_keys(tmp_path)
    signing = Node(tmp_path, compile_cache_signing_key_file=private)
    signing.cache.mkdir()
    signing.cache.chmod(0o1777)
    assert signing.start().published == {str(signing.cache): "stored"}
    reading = Node(tmp_path / "reader", compile_cache_signing_key_file=public)
    reading.settings = Settings(
        compile_cache=(str(signing.cache),), compile_cache_signing_key_file=public
    )
    assert reading.start().status == "hit"
    assert warnings(caplog) == []
    # Somebody without the key puts an entry of his own in its place.
    unsigned = package(write_trees(tmp_path / "hostile", {"inductor": {"x.py": b"evil"}}))
    (signing.entry / "manifest").write_bytes(unsigned.envelope)
    (signing.entry / "blob").write_bytes(unsigned.blob.read())
    outcome = reading.start()
    assert outcome.status == "miss"
    assert "not signed" in warnings(caplog)[-1]
    assert outcome.published == {str(signing.cache): "there is only the public key"}
    assert signing.start().published == {str(signing.cache): "stored"}
    assert reading.start().status == "hit"
    keyless = NodeStore(signing.cache, max_bytes=BOUND_BYTES)
    with pytest.raises(StoreUnsafeError):
        keyless.get(unsigned.manifest.key)
    other = NodeStore(signing.cache, max_bytes=BOUND_BYTES, keys=_other_key(tmp_path))
    with pytest.raises(BundleUntrustedError):
        other.get(unsigned.manifest.key)


def _other_key(tmp_path: Path) -> Any:
    from fastload_common.compile_cache.trust import load_keys

    return load_keys(write_keys(tmp_path)[0])


def test_c16_links_and_pipes_in_the_place_of_an_entrys_files_are_not_followed(node: Node) -> None:
    node.start()
    secret = node.cache.parent / "secret"
    secret.write_bytes(b"secret")
    blob = node.entry / "blob"
    blob.unlink()
    blob.symlink_to(secret)
    assert node.start().status == "miss"
    shutil.rmtree(node.cache)
    node.start()
    (node.entry / "blob").unlink()
    os.mkfifo(node.entry / "blob")
    assert node.start().status == "miss"
    assert node.start().status == "hit"
    assert secret.read_bytes() == b"secret"


def test_c16_more_than_the_bound_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    large = Node(tmp_path)
    made = package(write_trees(tmp_path / "a", {"inductor": {"x": bytes(3 << 20)}}))
    NodeStore(large.cache, max_bytes=BOUND_BYTES).put(made)
    small = Settings(compile_cache=(str(large.cache),), compile_cache_max_bytes=1 << 20)
    cache = CompileCache.open(small, SystemClock())
    assert cache is not None
    outcome = cache.restore(FACTORS, {"inductor": tmp_path / "b" / "inductor"})
    cache.close()
    assert outcome.status == "miss"
    assert not (tmp_path / "b").exists()


# C20 and E05: what cannot be stored, and how much may be


@pytest.mark.parametrize("code", ["ENOSPC", "EROFS", "EDQUOT", "EACCES", "EFBIG"])
@pytest.mark.parametrize("call", ["fsync", "rename", "fchmod"])
def test_c20_a_failing_disk_is_one_warning_and_leaves_nothing(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: str,
    call: str,
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    with monkeypatch.context() as patch:
        patch.setattr(f"fastload_common.compile_cache.stores.node.os.{call}", fail)
        outcome = node.start()
    assert outcome.status == "miss"
    assert os.strerror(getattr(errno, code)) in outcome.published[str(node.cache)]
    assert len(warnings(caplog)) == 1
    assert node.leftovers() == []
    node.start()
    assert node.start().status == "hit"


@needs_root
def test_c20_a_full_file_system_is_one_warning(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=4m tmpfs {tmp_path} 2>/dev/null || exit 77; exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    try:
        probe = subprocess.run([*prefix, "true"], check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if probe.returncode:
        pytest.skip("nothing can be mounted here")
    found = worker("start", tmp_path / "cache", prefix=prefix)
    assert found["done"]
    assert found["status"] == "miss"
    assert found["left"] == []
    assert found["published"][str(tmp_path / "cache")] == "OSError: No space left on device"
    assert found["stderr"].count("compile cache") == 1, found["stderr"]


@needs_root
def test_c20_e01_another_user_without_name_or_home_reads_and_cannot_write(tmp_path: Path) -> None:
    """Entries of root, as a node agent leaves them; then a directory of nobody."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    base = Path("/tmp") / f"fastload-test-{os.getpid()}"
    cache = base / "cache"
    base.mkdir(mode=0o755)
    try:
        roots = write_trees(tmp_path / "a", {"inductor": {"a": b"x"}})
        NodeStore(cache, max_bytes=BOUND_BYTES).put(package(roots))
        prefix = ("setpriv", "--reuid=1000680000", "--regid=0", "--clear-groups")
        environ = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            found = worker("start", cache, prefix=prefix, env=environ)
        except AssertionError as error:
            if "ModuleNotFoundError" in str(error) or "Permission" in str(error):
                pytest.skip("that user cannot read this environment")
            raise
        assert found["status"] == "hit"
        assert "compile cache" not in found["stderr"]
        found = worker("start", base / "other", prefix=prefix, env=environ)
        assert found["status"] == "miss"
        assert found["published"] == {str(base / "other"): "PermissionError: Permission denied"}
        assert found["stderr"].count("compile cache") == 1, found["stderr"]
    finally:
        shutil.rmtree(base)


def test_c20_what_cannot_be_packed_is_one_warning(
    node: Node, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    cache = CompileCache.open(node.settings, SystemClock())
    assert cache is not None
    roots = write_trees(tmp_path / "a")
    (roots["triton"] / "out").symlink_to("/")
    outcome = cache.restore(FACTORS, {name: tmp_path / "b" / name for name in TREES})
    cache.publish(outcome, roots)
    assert cache.close(60)
    assert "leads out" in outcome.published[str(node.cache)]
    assert len(warnings(caplog)) == 1


def test_e05_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    made = [package(write_trees(tmp_path / "a"), {**FACTORS, "layout.tensor": n}) for n in range(6)]
    size_bytes = made[0].manifest.blob_bytes + len(made[0].envelope)
    store = NodeStore(tmp_path / "cache", max_bytes=3 * size_bytes + 100)
    keys = [each.manifest.key for each in made]
    for number, each in enumerate(made[:3]):
        assert store.put(each).stored
        os.utime(tmp_path / "cache/v1/entries" / keys[number], (number, number))
    entry = store.get(keys[0])  # now the second one is the oldest
    assert entry is not None
    with entry:
        assert store.put(made[3]).stored
        assert set(store.keys()) == {keys[0], keys[2], keys[3]}
        store.put(made[4])
        store.collect(0)
        assert store.keys() == []
        unpack(entry.manifest, entry.blob, {name: tmp_path / "b" / name for name in TREES})
    tiny = NodeStore(tmp_path / "cache", max_bytes=100)
    assert "more than FASTLOAD_COMPILE_CACHE_MAX_BYTES" in tiny.put(made[5]).reason


def test_e03_nothing_is_written_but_into_the_cache_and_the_roots(
    node: Node, tmp_path: Path
) -> None:
    node.start()
    node.start()
    assert sorted(os.listdir(tmp_path)) == ["cache", "starts"]
    assert sorted(os.listdir(tmp_path / "starts" / "2")) == sorted(TREES)


# Settings


@pytest.mark.parametrize(
    "places",
    [("cache",), ("/a", "/b"), ("s3://a/b", "s3://c/d"), ("gs://a/b",), ("/",)],
)
def test_places_that_cannot_be_meant_are_refused(places: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        CompileCache.open(Settings(compile_cache=places))


def test_without_the_setting_there_is_no_cache() -> None:
    assert CompileCache.open(Settings()) is None


def test_factors_that_can_not_be_trusted_are_one_warning_and_no_entry(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = node.start(**{"engine.version": None})
    assert (outcome.status, outcome.key, outcome.published) == ("failed", "", {})
    assert len(warnings(caplog)) == 1
    assert not node.cache.exists()
