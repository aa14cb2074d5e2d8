"""Stores that others can write, that never answer, or that hold what no start may unpack."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from fastload_common.clock import SystemClock
from fastload_common.compile_cache.key import canonical
from fastload_common.compile_cache.lifecycle import CompileCache
from fastload_common.compile_cache.manifest import decode_manifest
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.stores.s3 import S3Store
from fastload_common.compile_cache.stores.tiered import TieredStore
from fastload_common.config import load_settings
from fastload_common.errors import BundleInvalidError, StoreUnsafeError
from fastload_common.units import MIB
from tests.common.compile_cache.artefacts import FACTORS, package, write_trees


@pytest.mark.parametrize("bound", [[], "text", None, 5])
def test_a_manifest_whose_bound_is_no_table_is_invalid(tmp_path: Path, bound: Any) -> None:
    magic, payload, _ = package(write_trees(tmp_path)).envelope.split(b"\n", 2)
    changed = json.loads(payload) | {"bound": bound}
    body = magic + b"\n" + canonical(changed) + b"\nunsigned\n"
    with pytest.raises(BundleInvalidError, match="does not say what it must"):
        decode_manifest(body + hashlib.sha256(body).hexdigest().encode() + b"\n")


@pytest.mark.parametrize("name", ["drafts", "quarantine"])
def test_nothing_is_removed_through_a_link(tmp_path: Path, name: str) -> None:
    """Another user of a directory of mode 1777 may have put it there."""
    others = tmp_path / "others"
    for number in range(8):
        (others / f"project{number}").mkdir(parents=True)
        os.utime(others / f"project{number}", (10**9, 10**9))
    base = tmp_path / "cache" / "v1"
    base.mkdir(parents=True)
    (base / name).symlink_to(others)
    store = NodeStore(tmp_path / "cache", max_bytes=MIB, forced=True)
    made = package(write_trees(tmp_path / "trees"))
    with pytest.raises(StoreUnsafeError, match="a link"):
        store.put(made)
    with pytest.raises(StoreUnsafeError, match="a link"):
        store.collect()
    (base / "entries" / made.manifest.key).mkdir(parents=True)
    assert not store.reject(made.manifest.key)
    assert len(list(others.iterdir())) == 8


@pytest.mark.parametrize("name", ["", "manifest"])
def test_an_entry_that_others_can_write_is_not_used(tmp_path: Path, name: str) -> None:
    """It may be older than the mode of the directory."""
    made = package(write_trees(tmp_path / "trees"))
    store = NodeStore(tmp_path / "cache", max_bytes=MIB)
    assert store.put(made).stored
    path = tmp_path / "cache/v1/entries" / made.manifest.key / name
    path.chmod(path.stat().st_mode | 0o022)
    with pytest.raises(StoreUnsafeError, match="others can write"):
        store.get(made.manifest.key)
    assert store.manifest(made.manifest.key) is None
    entry = NodeStore(tmp_path / "cache", max_bytes=MIB, forced=True).get(made.manifest.key)
    assert entry is not None
    entry.blob.close()


def test_what_may_not_be_unpacked_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FASTLOAD_COMPILE_CACHE_MAX_BYTES", "1MiB")
    cache = CompileCache.open(load_settings())
    assert cache is not None
    roots = write_trees(tmp_path / "trees", {"inductor": {"zeros": bytes(2 * MIB)}})
    outcome = cache.restore(FACTORS, {"inductor": tmp_path / "there"})
    cache.publish(outcome, roots)
    assert cache.finish(60)
    (said,) = outcome.published.values()
    assert "more than one entry may" in said
    assert not list((tmp_path / "cache").rglob("manifest"))


def test_a_store_that_never_ends_an_answer_is_left_at_the_deadline(tmp_path: Path) -> None:
    ended = threading.Event()

    class Endless:
        name = "s3://endless"

        def put(self, *_: Any, **__: Any) -> None:
            ended.wait(60)

        def manifests(self, _: int) -> list[Any]:
            ended.wait(60)
            return []

    remote = cast("S3Store", Endless())
    stores = TieredStore(None, remote, deadline_s=0.1, clock=SystemClock())
    try:
        assert stores.nearest(FACTORS) is None
        done = stores.put(package(write_trees(tmp_path)))
        assert "within 0.1 s" in done["s3://endless"].reason
        assert not ended.is_set()
    finally:
        ended.set()
