"""A pull of which only the last rename failed: the next one has nothing to do but that."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fastload_common.errors import PullError
from fastload_common.pull import pull as pulling
from fastload_common.pull import stage as staging
from fastload_common.pull.records import PullReport
from fastload_common.pull.stage import Stage
from tests.common.pull.images import Blobs, archive, directory, file, link, tree_of

LOWER = archive(directory("./"), directory("d/", 0o750), file("d/first", b"1" * 5000), file("gone"))
UPPER = archive(file(".wh.gone", b""), link("second", "d/first"))


class Scene:
    """One destination; pulled to again and again."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.destination = place / "new"
        self._monkeypatch = monkeypatch
        self._blobs = Blobs(place / "blobs")

    def pull(self, *tars: bytes) -> PullReport:
        return self._blobs.pull(self._monkeypatch, self.destination, tars, tars)

    def fail_the_last_rename(self, *tars: bytes) -> None:
        """Somebody takes the destination after the last look at it."""

        def taken(stage: Stage) -> None:
            (stage.destination / "mine").mkdir(parents=True)

        with self._monkeypatch.context() as patched:
            patched.setattr(Stage, "check_free", taken)
            with pytest.raises(PullError, match="could not be made"):
                self.pull(*tars)
        shutil.rmtree(self.destination)

    @property
    def stages(self) -> list[Path]:
        return list(self.place.glob(".fastload-pull-*"))


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_the_next_pull_only_renames(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    first = scene.pull(LOWER, UPPER)
    undisturbed = tree_of(scene.destination)
    shutil.rmtree(scene.destination)
    scene.fail_the_last_rename(LOWER, UPPER)

    def used(*args: Any, **more: Any) -> None:
        raise AssertionError("there is nothing to fetch or to merge")

    monkeypatch.setattr(pulling, "merge_layers", used)
    monkeypatch.setattr(pulling, "Download", used)
    report = scene.pull(LOWER, UPPER)
    assert tree_of(scene.destination) == undisturbed
    assert not scene.stages
    assert report.fetched_bytes == 0
    assert report.resumed_bytes == first.size_bytes
    for name in ("entries", "unpacked_bytes", "compared", "layers", "left_out", "not_owned"):
        assert getattr(report, name) == getattr(first, name), name


@pytest.mark.parametrize("change", ["file", "tag", "boot"])
def test_a_tree_that_is_another_is_not_renamed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    scene.fail_the_last_rename(LOWER, UPPER)
    upper = UPPER
    if change == "file":
        (scene.stages[0] / "tree" / "d" / "first").write_bytes(b"2" * 5000)
    elif change == "tag":
        upper = archive(file("more"))
    else:
        monkeypatch.setattr(staging, "boot_id", lambda: "another")
    report = scene.pull(LOWER, upper)
    assert report.fetched_bytes == report.size_bytes
    assert (scene.destination / "d" / "first").read_bytes() == b"1" * 5000
    assert (scene.destination / "more").exists() == (change == "tag")
    assert not scene.stages
