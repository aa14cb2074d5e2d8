"""Archives that were made to harm: each gets its error, and nothing outside is touched."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fastload_common.config import Settings
from fastload_common.errors import ArchiveUnsafeError, PullError
from fastload_common.pull import policy
from tests.common.pull.hostile import CASES, LINKS, Case
from tests.common.pull.images import Blobs, archive, directory, file, link, symlink, tree_of


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


def test_what_was_unpacked_before_counts_for_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = [archive(file(f"f{number}", bytes(1 << 20))) for number in range(5)]
    blobs = Blobs(tmp_path / "blobs", settings=Settings(max_unpacked_bytes=4 << 20))
    for _ in range(3):
        with pytest.raises(ArchiveUnsafeError, match="unpack to"):
            blobs.pull(monkeypatch, tmp_path / "new", tars, tars)


def test_directories_that_no_entry_stands_for_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_MOST_ENTRIES", 100)
    tar = archive(file("d/" * 100 + "x"))
    with pytest.raises(ArchiveUnsafeError, match="more than 100 entries"):
        Blobs(tmp_path / "blobs").pull(monkeypatch, tmp_path / "new", [tar], [tar])


def test_a_large_file_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "_MOST_ENTRIES", 10)
    tar = archive(file("x", bytes(12 << 20)))
    Blobs(tmp_path / "blobs").pull(monkeypatch, tmp_path / "new", [tar], [tar])


def test_nothing_stays_of_a_layer_that_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = archive(file("large", bytes(1 << 20)), file("../x"))
    with pytest.raises(ArchiveUnsafeError, match="leaves"):
        Blobs(tmp_path / "blobs").pull(monkeypatch, tmp_path / "new", [tar], [tar])
    assert list(tmp_path.glob(".fastload-pull-*/layers/*")) == []


def test_a_hard_link_to_one_that_waits_for_the_layers_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars = [archive(file("f", b"content")), archive(link("x", "f"), link("y", "x"))]
    Blobs(tmp_path / "blobs").pull(monkeypatch, tmp_path / "new", tars, tars)
    assert {(tmp_path / "new" / name).read_bytes() for name in "fxy"} == {b"content"}
    assert (tmp_path / "new" / "f").stat().st_nlink == 3


@pytest.mark.parametrize("layers", [1, 2])
def test_a_hard_link_moves_no_link_to_where_it_leads_out_of_an_artifact(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [symlink("d/x", "../outside"), link("y", "d/x")]
    tars = [archive(*entries)] if layers == 1 else [archive(entry) for entry in entries]
    with pytest.raises(ArchiveUnsafeError, match="leads out of the directory"):
        Blobs(tmp_path / "blobs", False).pull(monkeypatch, tmp_path / "new", tars, tars)
    Blobs(tmp_path / "blobs").pull(monkeypatch, tmp_path / "image", tars, tars)
    assert (tmp_path / "image" / "y").readlink() == Path("../outside")
