"""The metadata directory: what is in it, and when it is another one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    NoWeightsError,
    ObjectMissingError,
    ShardTruncatedError,
)
from fastload_common.load import metadata_files
from fastload_common.load.metadata import (
    fetch_metadata,
    require_configuration,
    require_tokenizer,
)
from fastload_common.source.base import ListedObject, ObjectSource
from fastload_common.source.registry import open_source
from fastload_common.testing.s3_server import S3Server
from tests.common.load.metadata_models import (
    TENSORS,
    entries,
    left_overs,
    make_model,
    names_in,
)

pytestmark = pytest.mark.torch


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


# -- what is in it ---------------------------------------------------------------------------


def test_small_files_and_headers_are_there_and_nothing_else(
    tmp_path: Path, settings: Settings
) -> None:
    model = make_model(tmp_path / "m")
    found = fetch_metadata(str(model), settings)
    assert names_in(found) == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "modeling_tiny.py",
        "tokenizer.model",
        "1_Pooling/config.json",
        "code/more/helper.py",
        "model.safetensors",
    }
    for name in names_in(found) - {"model.safetensors"}:
        assert (found / name).read_bytes() == (model / name).read_bytes()
    assert left_overs(settings) == []


def test_a_weight_file_is_its_header_only(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    stub = fetch_metadata(str(model), settings) / "model.safetensors"
    data = stub.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    assert len(data) == 8 + size
    header = json.loads(data[8:])
    real = (model / "model.safetensors").read_bytes()
    wanted = json.loads(real[8 : 8 + struct.unpack("<Q", real[:8])[0]])
    wanted.pop("__metadata__", None)
    assert header == wanted
    with pytest.raises(SafetensorError):
        safe_open(stub, "pt")


def test_dense_modules_of_sentence_transformers_are_whole_files(
    tmp_path: Path, settings: Settings
) -> None:
    model = make_model(tmp_path / "m")
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, model / "2_Dense" / "model.safetensors")
    found = fetch_metadata(str(model), settings)
    with safe_open(found / "2_Dense" / "model.safetensors", "pt") as opened:
        assert torch.equal(opened.get_tensor("linear.weight"), torch.ones(2, 2))


def test_f14_ignore_patterns_are_honoured(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    narrow = Settings(cache_dir=settings.cache_dir, ignore_patterns=("code/**", "*.jinja"))
    names = names_in(fetch_metadata(str(model), narrow))
    assert "code/more/helper.py" not in names
    assert "chat_template.jinja" not in names
    assert "original/params.json" in names


def test_a_file_above_the_limit_is_skipped_and_said(
    tmp_path: Path,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(tmp_path / "m")
    (model / "huge.json").write_bytes(b" " * 2000)
    monkeypatch.setattr(metadata_files, "MAX_FILE_BYTES", 1000)
    assert "huge.json" not in names_in(fetch_metadata(str(model), settings))
    assert "huge.json" in caplog.text


def test_a_tokenizer_of_its_own_needs_no_weights(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    (model / "model.safetensors").unlink()
    found = fetch_metadata(str(model), settings, weights=False)
    assert "tokenizer.json" in names_in(found)
    with pytest.raises(NoWeightsError):
        fetch_metadata(str(model), settings)


def test_damaged_weights_show_here_already(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ShardTruncatedError, match=r"model\.safetensors"):
        fetch_metadata(str(model), settings)
    assert entries(settings) == []
    assert left_overs(settings) == []


def test_e08_a_missing_file_is_named_by_its_uri(tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError, match=r"s3://b/m .*config\.json"):
        require_configuration("s3://b/m", tmp_path)
    with pytest.raises(ObjectMissingError, match=r"s3://b/m .*tokenizer"):
        require_tokenizer("s3://b/m", tmp_path)
    (tmp_path / "params.json").touch()
    (tmp_path / "qwen.tiktoken").touch()
    require_configuration("s3://b/m", tmp_path)
    require_tokenizer("s3://b/m", tmp_path)


# -- which directory -------------------------------------------------------------------------


def test_equal_content_has_one_path_wherever_it_comes_from(
    tmp_path: Path, settings: Settings
) -> None:
    first = fetch_metadata(str(make_model(tmp_path / "a")), settings)
    second = fetch_metadata(str(make_model(tmp_path / "b")), settings)
    assert first == second
    assert len(entries(settings)) == 1


def test_another_content_has_another_path(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    first = fetch_metadata(str(model), settings)
    (model / "config.json").write_text('{"model_type": "other"}')
    second = fetch_metadata(str(model), settings)
    assert first != second
    assert (first / "config.json").read_text() == '{"model_type": "tiny"}'
    assert (second / "config.json").read_text() == '{"model_type": "other"}'


def test_other_tensors_have_another_path_too(tmp_path: Path, settings: Settings) -> None:
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    fewer = {name: value for name, value in TENSORS.items() if name != "lm_head.weight"}
    save_file(fewer, second / "model.safetensors")
    assert fetch_metadata(str(first), settings) != fetch_metadata(str(second), settings)


class CountingSource:
    """A source that counts what is read; the listing may be refused."""

    def __init__(self, source: ObjectSource, *, denied: bool = False) -> None:
        self._source = source
        self._denied = denied
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def list(self, *, recursive: bool = True) -> object:
        if self._denied:
            raise AccessDeniedError("not allowed to list")
        return self._source.list(recursive=recursive)

    def read(self, object_id: object, byte_range: object = None) -> bytes:
        self.reads.append(object_id.uri)  # type: ignore[attr-defined]
        return self._source.read(object_id, byte_range)  # type: ignore[arg-type]


def fetch_counting(
    model: Path, settings: Settings, *, denied: bool = False
) -> tuple[Path, CountingSource]:
    sources: list[CountingSource] = []

    def open_root(uri: str, settings: Settings) -> ObjectSource:
        sources.append(CountingSource(open_source(uri, settings), denied=denied))
        return sources[-1]  # type: ignore[return-value]

    return fetch_metadata(str(model), settings, open_root=open_root), sources[0]


def test_e11_a_second_start_reads_nothing(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    first, cold = fetch_counting(model, settings)
    second, warm = fetch_counting(model, settings)
    assert first == second
    assert len(cold.reads) > 5
    assert warm.reads == []


def test_a_damaged_entry_is_replaced(tmp_path: Path, settings: Settings) -> None:
    model = make_model(tmp_path / "m")
    found = fetch_metadata(str(model), settings)
    (found / "tokenizer.json").unlink()
    assert fetch_metadata(str(model), settings) == found
    assert (found / "tokenizer.json").read_text() == "{}"
    (found / "config.json").write_text("cut")
    assert fetch_metadata(str(model), settings) == found
    assert (found / "config.json").read_text() == '{"model_type": "tiny"}'
    (found / "config.json").write_text('{"model_type": "TINY"}')  # of the same size
    assert fetch_metadata(str(model), settings) == found
    assert (found / "config.json").read_text() == '{"model_type": "tiny"}'


def test_without_permission_to_list_the_usual_names_are_asked(
    tmp_path: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path / "m")
    found, _ = fetch_counting(model, settings, denied=True)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names_in(found)
    assert "may not be listed" in caplog.text


@pytest.mark.s3
def test_from_a_real_store(
    tmp_path: Path, settings: Settings, s3_server: S3Server, s3_bucket: str
) -> None:
    model = make_model(tmp_path / "m")
    s3_server.upload_dir(model, s3_bucket, "some/model")
    found = fetch_metadata(f"s3://{s3_bucket}/some/model", settings)
    assert found == fetch_metadata(str(model), settings)


# -- keys that no file system can have -------------------------------------------------------


def listed(source_root: Path, *keys: str) -> list[ListedObject]:
    (source_root / "x").write_text("x")
    object_id = open_source(str(source_root), Settings()).stat("x")
    return [ListedObject(key, object_id) for key in keys]


def test_unsafe_keys_are_skipped(tmp_path: Path) -> None:
    keys = ("../evil.py", "a//b.json", "/etc/x.json", "a/./c.json", "n" * 256 + ".json", "ok.json")
    chosen = metadata_files.choose_metadata(listed(tmp_path, *keys), (), root="r")
    assert [item.key for item in chosen] == ["ok.json"]


def test_a_key_that_is_also_a_folder_is_skipped(tmp_path: Path) -> None:
    chosen = metadata_files.choose_metadata(
        listed(tmp_path, "code", "code/a.py", "config.json"), (), root="r"
    )
    assert [item.key for item in chosen] == ["code/a.py", "config.json"]


def test_a_root_of_many_models_gives_its_own_level_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [f"model-{number}/config.json" for number in range(metadata_files.MAX_FILES)]
    chosen = metadata_files.choose_metadata(listed(tmp_path, "config.json", *keys), (), root="r")
    assert [item.key for item in chosen] == ["config.json"]
    assert "root of one model" in caplog.text
