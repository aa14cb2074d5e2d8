"""A name must lead to the directory of the very state that was listed, now and later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.config import Settings
from fastload_common.errors import ObjectChangedError
from fastload_common.load.metadata import fetch_metadata
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject
from fastload_common.testing.recording_source import RecordingSource
from tests.common.load.metadata_models import entries, make_model, names_in

pytestmark = pytest.mark.torch


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


def fetch_from(source: RecordingSource, settings: Settings) -> Path:
    return fetch_metadata(source.root, settings, open_root=lambda *_: source)


def replace_weights(model: Path) -> None:
    save_file({"other": torch.zeros(3)}, model / "new")
    os.replace(model / "new", model / "model.safetensors")


def tensor_names(directory: Path) -> set[str]:
    header = (directory / "model.safetensors").read_bytes()[8:]
    return set(json.loads(header)) - {"__metadata__"}


class Changing(RecordingSource):
    """Calls a function after its first listing."""

    def __init__(self, directory: Path, change: Callable[[Path], None]) -> None:
        super().__init__(directory)
        self._model = directory
        self._change = change

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        listed = super().list(recursive=recursive)
        if len(self.lists) == 1:
            self._change(self._model)
        return listed


def test_weights_replaced_after_the_listing_are_not_kept_under_its_name(
    tmp_path: Path, settings: Settings
) -> None:
    """They might be put back; then that name would lead to the other state's headers for ever."""
    source = Changing(make_model(tmp_path / "m"), replace_weights)
    with pytest.raises(ObjectChangedError):
        fetch_from(source, settings)
    assert entries(settings) == []
    assert tensor_names(fetch_metadata(str(tmp_path / "m"), settings)) == {"other"}


def test_the_root_is_listed_once(tmp_path: Path, settings: Settings) -> None:
    source = RecordingSource(make_model(tmp_path / "m"))
    fetch_from(source, settings)
    assert source.lists == [True]


def test_without_a_listing_replaced_weights_are_seen(tmp_path: Path, settings: Settings) -> None:
    """Files found by name do not include the weights, so these do not tell states apart."""
    model = make_model(tmp_path / "m")
    first = fetch_from(RecordingSource(model, may_list=False), settings)
    replace_weights(model)
    second = fetch_from(RecordingSource(model, may_list=False), settings)
    assert tensor_names(first) != {"other"}
    assert tensor_names(second) == {"other"}


def test_other_patterns_have_another_directory(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    assert "chat_template.jinja" in names_in(fetch_metadata(str(model), settings))
    fewer = Settings(cache_dir=settings.cache_dir, ignore_patterns=("*.jinja",))
    assert "chat_template.jinja" not in names_in(fetch_metadata(str(model), fewer))


class WithEtag(RecordingSource):
    """Its objects all have this ETag."""

    def __init__(self, directory: Path, etag: str) -> None:
        super().__init__(directory)
        self._etag = etag

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        listed = super().list(recursive=recursive)
        return [replace(row, object_id=replace(row.object_id, etag=self._etag)) for row in listed]

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        present = self.stat(object_id.uri.removeprefix(f"{self.root}/"))
        return super().read(present, byte_range)


@pytest.mark.parametrize("etag", ['""', 'W/"x"'])
def test_an_etag_that_tells_no_states_apart_is_no_name(
    tmp_path: Path, settings: Settings, etag: str
) -> None:
    model = make_model(tmp_path / "m")
    for name in ("first", "other"):  # of one length, so that the sizes are the same
        save_file({name: torch.zeros(3)}, model / "model.safetensors")
        assert tensor_names(fetch_from(WithEtag(model, etag), settings)) == {name}
