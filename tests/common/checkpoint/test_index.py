"""Index files, right and wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastload_common.checkpoint.index import natural_order, parse_index
from fastload_common.errors import CheckpointError

KEY = "model.safetensors.index.json"


def index_text(weight_map: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def test_files_come_once_in_natural_order() -> None:
    weight_map = {f"w{i}": f"model-{n}.safetensors" for i, n in enumerate([10, 2, 1, 10])}
    index = parse_index(index_text(weight_map), key=KEY, root="s3://b/m")
    assert index.files == ("model-1.safetensors", "model-2.safetensors", "model-10.safetensors")
    assert index.weight_map == weight_map
    assert index.tensor_counts()["model-10.safetensors"] == 2


def test_files_stand_beside_the_index() -> None:
    index = parse_index(index_text({"w": "a.safetensors"}), key=f"sub/{KEY}", root="s3://b/m")
    assert index.files == ("sub/a.safetensors",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1", "not valid JSON"),
        (b"[]", "weight_map"),
        (b"null", "weight_map"),
        (b"{}", "weight_map"),
        (b'{"weight_map": null}', "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {}}', "weight_map"),
        (index_text({"w": 1}), "not a file name"),
        (index_text({"w": None}), "not a file name"),
        (index_text({"w": ""}), "must not leave"),
        (index_text({"w": "../other/a.safetensors"}), "must not leave"),
        (index_text({"w": "sub/../../a.safetensors"}), "must not leave"),
        (index_text({"w": "./a.safetensors"}), "must not leave"),
        (index_text({"w": "sub//a.safetensors"}), "must not leave"),
        (index_text({"w": "s3://other/a.safetensors"}), "must not leave"),
        (index_text({"w": "/etc/a.safetensors"}), "not a path relative"),
        (index_text({"w": "..\\a.safetensors"}), "not a path relative"),
        (index_text({"w": "a\0.safetensors"}), "not a path relative"),
        (index_text({"w": "pytorch_model.bin"}), r"not a \.safetensors file"),
        (
            b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
            "two files, a.safetensors and b.safetensors",
        ),
    ],
)
def test_wrong_index_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        parse_index(text, key=KEY, root="s3://b/m")
    assert f"s3://b/m/{KEY}" in str(caught.value)
    assert caught.value.hint


def test_same_entry_twice_is_taken() -> None:
    text = b'{"weight_map": {"w": "a.safetensors", "w": "a.safetensors"}}'
    assert parse_index(text, key=KEY, root="s3://b/m").files == ("a.safetensors",)


def test_natural_order() -> None:
    keys = ["m-10", "m-9", "m-010", "m", "m-9a", "a-11", "m-" + "1" * 5000, "m-2-of-3", "m-10-of-3"]
    assert sorted(keys, key=natural_order) == [
        "a-11",
        "m",
        "m-2-of-3",
        "m-9",
        "m-9a",
        "m-010",
        "m-10",
        "m-10-of-3",
        "m-" + "1" * 5000,
    ]
