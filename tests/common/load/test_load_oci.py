"""Whole loads from a registry: raw layers and an archive, compared with digests, one state."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fastload_common.config import Settings, load_settings
from fastload_common.engine.object_model import fetch_model, pin_model
from fastload_common.errors import ChecksumMismatchError, NoWeightsError
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.testing.scripted_registry import Answer, Asked, ScriptedRegistry, ranged
from tests.common.load.session_harness import Model

RAW = "application/vnd.cncf.model.weight.v1.raw"
TAR = "application/vnd.kitops.modelkit.model.v1.tar"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def registry() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry() as made:
        yield made


@pytest.fixture
def model(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """A model's files."""
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    shards = {
        file: save({name: tensors[name] for name in half})
        for file, half in zip(FILES, halves, strict=True)
    }
    small = {"config.json": b'{"model_type": "x"}', "tokenizer.json": b"{}"}
    return shards | small


def push(registry: ScriptedRegistry, model: dict[str, bytes], tag: str = "v") -> None:
    """As raw layers under the tag, and as one archive under it with -tar."""
    layers = [
        registry.put(data, RAW, {"org.cncf.model.filepath": name}) for name, data in model.items()
    ]
    registry.artifact(tag, layers)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in model.items():
            info = tarfile.TarInfo(f"m/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    registry.artifact(f"{tag}-tar", [registry.put(out.getvalue(), TAR)])


def settings_for(registry: ScriptedRegistry, tmp_path: Path, **more: str) -> Settings:
    extra = {"progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "1MiB"}
    places = {"oci_plain_http": registry.host, "cache_dir": str(tmp_path / "cache")}
    return load_settings(extra | places | {"max_attempts": "2"} | more, {})


def load(uri: str, settings: Settings, model: Model) -> LoadSession:
    with LoadSession([WeightSource(uri)], settings) as session:
        session.load(model, model.load_weights)
    return session


@pytest.mark.parametrize("root", ["m:v", "m:v-tar/m"])
def test_every_tensor_is_there(
    registry: ScriptedRegistry,
    model: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    root: str,
    tmp_path: Path,
) -> None:
    push(registry, model)
    filled = Model(tensors)
    load(f"oci://{registry.host}/{root}", settings_for(registry, tmp_path), filled)
    assert filled.holds(tensors)


def test_verify_compares_layers_with_their_digests(
    registry: ScriptedRegistry,
    model: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    push(registry, model)
    uri = f"oci://{registry.host}/m:v"
    for verify, compared in (("full", 2), ("covered", 0)):
        settings = settings_for(registry, tmp_path, verify=verify)
        session = load(uri, settings, Model(tensors))
        assert session.report.verified["compared"] == compared
        assert session.report.verified["without_checksum"] == 2 - compared
    # Files in archives have no digests of their own.
    settings = settings_for(registry, tmp_path, verify="full")
    session = load(f"oci://{registry.host}/m:v-tar/m", settings, Model(tensors))
    assert session.report.verified["without_checksum"] == 2


def test_a_damaged_layer_is_found_by_its_digest(
    registry: ScriptedRegistry,
    model: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    push(registry, model)
    shard = model[FILES[1]]
    layer = registry.put(shard, RAW)["digest"]
    damaged = shard[:-1] + bytes([shard[-1] ^ 1])

    def lie(asked: Asked) -> Answer | None:
        return ranged(damaged, asked) if asked.path.endswith(layer) else None

    registry.script = lie
    uri = f"oci://{registry.host}/m:v"
    with pytest.raises(ChecksumMismatchError, match="not what its digest says") as caught:
        load(uri, settings_for(registry, tmp_path, verify="full"), Model(tensors))
    assert caught.value.fields["endpoint"] == f"http://{registry.host}"


def test_a_tag_that_moves_while_an_engine_starts_changes_nothing(
    registry: ScriptedRegistry,
    model: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    """The front end pins the tag; workers are told the digest."""
    push(registry, model)
    settings = settings_for(registry, tmp_path)
    pinned = pin_model(f"oci://{registry.host}/m:v", settings)
    push(registry, dict.fromkeys(model, b"{}"), "v")
    directory = fetch_model(pinned, settings, configuration=True, tokenizer=True)
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "x"}
    filled = Model(tensors)
    load(pinned, settings, filled)
    assert filled.holds(tensors)


def test_a_model_in_a_folder_is_told_where_it_is(
    registry: ScriptedRegistry, model: dict[str, bytes], tmp_path: Path
) -> None:
    push(registry, model)
    settings = settings_for(registry, tmp_path)
    with pytest.raises(NoWeightsError) as caught:
        fetch_model(f"oci://{registry.host}/m:v-tar", settings, configuration=True, tokenizer=True)
    assert f"oci://{registry.host}/m:v-tar/m" in str(caught.value)
