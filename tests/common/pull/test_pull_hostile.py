"""Archives that were made to harm: each gets its error, and nothing outside is touched."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import PullError
from tests.common.pull.hostile import CASES, LINKS, Case
from tests.common.pull.images import Blobs, archive, directory, file, symlink, tree_of


def area(tmp_path: Path) -> Path:
    """A directory with the destination's, and with what must stay as it is."""
    made = tmp_path / "area"
    (made / "outside").mkdir(parents=True)
    (made / "outside" / "canary").write_bytes(b"untouched")
    (made / "place").mkdir()
    (made / "place" / "canary").write_bytes(b"untouched")
    return made


def pull_case(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destination: Path
) -> None:
    settings = Settings(max_unpacked_bytes=case.most_bytes)
    blobs = Blobs(tmp_path / "blobs", case.image, settings=settings)
    stored = case.layers if case.stored else [gzip.compress(tar, 1) for tar in case.layers]
    blobs.pull(monkeypatch, destination, stored, [None] * len(case.layers))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_archive_is_refused_by_name(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = area(tmp_path)
    before = tree_of(made)
    before_place = before.pop("place")
    with pytest.raises(PullError) as caught:
        pull_case(case, tmp_path, monkeypatch, made / "place" / "new")
    assert type(caught.value) is case.error
    assert case.text in str(caught.value)
    after = tree_of(made)
    # Beside the destination is the stage, and nothing else is new.
    assert after.pop("place")[:-1] == before_place[:-1]
    assert {n: row for n, row in after.items() if ".fastload-pull-" not in n} == before
    assert not (made / "place" / "new").exists()


def test_there_are_many_and_each_is_another() -> None:
    assert len(CASES) >= 50
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.layers for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [case for case in LINKS if not case.image], ids=lambda c: c.name)
def test_links_that_an_artifact_may_not_have_mean_the_root_in_an_image(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = area(tmp_path)
    before = tree_of(made / "outside")
    image = Case(case.name, case.layers, case.error, case.text)
    pull_case(image, tmp_path, monkeypatch, made / "place" / "new")
    assert tree_of(made / "outside") == before


def test_an_absolute_link_of_a_layer_below_is_followed_within_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = [
        archive(directory("real/"), symlink("etc", "/real"), symlink("x", str(tmp_path))),
        archive(file("etc/passwd", b"inside")),
    ]
    destination = tmp_path / "new"
    Blobs(tmp_path / "blobs").pull(monkeypatch, destination, tars, tars)
    assert (destination / "real" / "passwd").read_bytes() == b"inside"
