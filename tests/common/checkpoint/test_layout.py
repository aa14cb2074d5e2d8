"""Which files of a folder are the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from fastload_common.checkpoint.index import CheckpointIndex, parse_index
from fastload_common.checkpoint.layout import choose_files, choose_index, usual_names
from fastload_common.errors import (
    CheckpointError,
    ConfigError,
    NoWeightsError,
    ShardMissingError,
)

ROOT = "s3://bucket/model"
HF_INDEX = "model.safetensors.index.json"
MISTRAL_INDEX = "consolidated.safetensors.index.json"


def numbered(total: int, stem: str = "model") -> list[str]:
    return [f"{stem}-{n:05}-of-{total:05}.safetensors" for n in range(1, total + 1)]


def index_of(weight_map: Mapping[str, str] | Sequence[str], key: str = HF_INDEX) -> CheckpointIndex:
    if not isinstance(weight_map, Mapping):
        weight_map = {f"w{i}": file for i, file in enumerate(weight_map)}
    return parse_index(json.dumps({"weight_map": weight_map}).encode(), key=key, root=ROOT)


def files(keys: Sequence[str], **arguments: object) -> tuple[str, ...]:
    return choose_files(keys, root=ROOT, **arguments).files  # type: ignore[arg-type]


# F10: a file that is listed and not there


def test_f10_every_missing_shard_is_named_with_its_tensors() -> None:
    shards = numbered(4)
    index = index_of(
        {"a": shards[0], "b": shards[1], "c": shards[1], "d": shards[2], "e": shards[3]}
    )
    with pytest.raises(ShardMissingError) as caught:
        files([shards[0], shards[2], HF_INDEX], index=index)
    text = str(caught.value)
    assert f"{shards[1]} (2 tensors)" in text
    assert f"{shards[3]} (1 tensors)" in text
    assert shards[0] not in text
    assert ROOT in text
    assert HF_INDEX in text


@pytest.mark.parametrize("first", [0, 1])
def test_f10_numbering_tells_without_an_index(first: int) -> None:
    names = [f"model-{n:05}-of-00004.safetensors" for n in range(first, first + 4)]
    assert files(names) == tuple(names)
    with pytest.raises(ShardMissingError, match=names[2]) as caught:
        files([names[0], names[1], names[3]])
    assert names[1] not in str(caught.value)


def test_f10_hostile_total_does_not_take_all_memory() -> None:
    with pytest.raises(ShardMissingError):
        files(["m-1-of-2.safetensors", "m-01-of-999999999.safetensors"])


# F11: a file that is there and not listed


def test_f11_unlisted_files_are_ignored_and_named() -> None:
    listed, stale = numbered(4), numbered(2)
    others = ["adapter_model.safetensors", "training_args.bin"]
    keys = [*listed, *stale, *others, HF_INDEX, "config.json"]
    choice = choose_files(keys, root=ROOT, index=index_of(listed))
    assert choice.files == tuple(listed)
    assert sorted(choice.ignored) == sorted([*stale, *others])


def test_f11_adapter_is_no_part_of_the_model_without_an_index_either() -> None:
    choice = choose_files(["model.safetensors", "adapter_model.safetensors"], root=ROOT)
    assert choice.files == ("model.safetensors",)
    assert choice.ignored == ("adapter_model.safetensors",)


# F13: two formats side by side

BOTH = ["consolidated.safetensors", *numbered(3), HF_INDEX, MISTRAL_INDEX, "params.json"]


@pytest.mark.parametrize(
    ("prefer", "index_key", "expected"),
    [
        ("hf", HF_INDEX, numbered(3)),
        ("auto", HF_INDEX, numbered(3)),
        ("mistral", MISTRAL_INDEX, ["consolidated.safetensors"]),
    ],
)
def test_f13_exactly_one_set(prefer: str, index_key: str, expected: list[str]) -> None:
    assert choose_index(BOTH, root=ROOT, prefer=prefer) == index_key
    index = index_of(expected, key=index_key)
    choice = choose_files(BOTH, root=ROOT, index=index, prefer=prefer)
    assert choice.files == tuple(expected)
    # And the same without any index.
    no_index = [key for key in BOTH if not key.endswith(".json")]
    assert choose_index(no_index, root=ROOT, prefer=prefer) is None
    assert files(no_index, prefer=prefer) == tuple(expected)


def test_f13_consolidated_in_parts_with_its_own_index() -> None:
    parts = numbered(2, "consolidated")
    keys = [*parts, "model.safetensors", MISTRAL_INDEX]
    assert choose_index(keys, root=ROOT, prefer="hf") is None
    assert files(keys, prefer="hf") == ("model.safetensors",)
    assert choose_index(keys, root=ROOT, prefer="auto") is None
    assert choose_index(keys, root=ROOT, prefer="mistral") == MISTRAL_INDEX
    index = index_of(parts, key=MISTRAL_INDEX)
    assert files(keys, prefer="mistral", index=index) == tuple(parts)


def test_f13_only_consolidated() -> None:
    keys = ["consolidated.safetensors", "params.json", MISTRAL_INDEX]
    assert files(keys, prefer="mistral") == ("consolidated.safetensors",)
    assert files(keys, prefer="auto") == ("consolidated.safetensors",)
    assert choose_index(keys, root=ROOT, prefer="auto") == MISTRAL_INDEX
    with pytest.raises(NoWeightsError, match=r"Mistral's own format.*consolidated\.safetensors"):
        files(keys, prefer="hf")


def test_f13_mistral_is_asked_for_and_not_there() -> None:
    with pytest.raises(NoWeightsError, match=r"Mistral format was asked.*model\.safetensors"):
        files(["model.safetensors", "config.json"], prefer="mistral")


def test_unknown_set_is_a_config_error() -> None:
    for choose in (choose_files, choose_index):
        with pytest.raises(ConfigError, match="gguf"):
            choose(["model.safetensors"], root=ROOT, prefer="gguf")


# F14: folders below the model

FOLDERS = [
    "original/consolidated.00.pth",
    "original/model.safetensors",
    "metal/model.bin",
    ".git/lfs/objects/aa/bb",
    "checkpoint-500/model.safetensors",
    "onnx/model.onnx",
    "README.md",
]


def test_f14_only_the_models_own_level() -> None:
    choice = choose_files([*FOLDERS, "model.safetensors"], root=ROOT)
    assert choice.files == ("model.safetensors",)
    assert choice.ignored == ()


def test_f14_folders_alone_are_no_model() -> None:
    with pytest.raises(NoWeightsError, match=r"README\.md"):
        files(FOLDERS)
    with pytest.raises(NoWeightsError, match=r"only folders.*original/"):
        files([key for key in FOLDERS if "/" in key])


def test_f14_index_of_a_folder_does_not_count() -> None:
    assert choose_index([f"original/{HF_INDEX}"], root=ROOT) is None


def test_f14_ignore_patterns() -> None:
    keys = ["model.safetensors", "model.fp16.safetensors"]
    choice = choose_files(keys, root=ROOT, ignore_patterns=["*.fp16.safetensors"])
    assert choice.files == ("model.safetensors",)
    assert choice.ignored == ("model.fp16.safetensors",)
    with pytest.raises(NoWeightsError, match="excluded"):
        files(keys, ignore_patterns=["*.safetensors"])
    with pytest.raises(ConfigError, match=r"lists model\.safetensors.*ignore_patterns"):
        files(keys, index=index_of(keys[:1]), ignore_patterns=["model*"])


# patterns and select


def test_patterns_decide_alone_and_the_first_that_matches_wins() -> None:
    keys = ["a.safetensors", "b.safetensors", "c.pt", "text/d.safetensors", HF_INDEX]
    assert choose_index(keys, root=ROOT, patterns=["*.safetensors"]) is None
    assert files(keys, patterns=["x*", "b*", "*.safetensors"]) == ("b.safetensors",)
    assert files(keys, patterns=["*.safetensors"]) == ("a.safetensors", "b.safetensors")
    assert files(keys, patterns=["text/*"]) == ("text/d.safetensors",)
    with pytest.raises(NoWeightsError, match=r"patterns \*\.pt"):
        files(keys, patterns=["*.pt", "*.safetensors"])
    with pytest.raises(NoWeightsError, match="patterns x"):
        files(keys, patterns=["x"])


def test_select_restricts_further() -> None:
    keys = numbered(2)
    index = index_of(keys)
    assert files(keys, index=index, select=lambda key: "00001" in key) == (keys[0],)


# index files


def test_index_with_a_name_of_its_own() -> None:
    one = "model.int8.safetensors.index.json"
    assert choose_index([one, "a.safetensors"], root=ROOT) == one
    assert choose_index([one, HF_INDEX], root=ROOT) == HF_INDEX
    with pytest.raises(CheckpointError, match="several index files"):
        choose_index([one, "model.fp16.safetensors.index.json"], root=ROOT)


def test_usual_names() -> None:
    assert usual_names("hf") == ((HF_INDEX,), ("model.safetensors",))
    assert usual_names("auto")[0] == (HF_INDEX, MISTRAL_INDEX)


# nothing to load


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([], "nothing stands there"),
        (["pytorch_model.bin", "config.json"], r"pickles: pytorch_model\.bin.*safe_serialization"),
        (["consolidated.00.pth", "params.json"], r"pickles: consolidated\.00\.pth"),
        (["model-q4.gguf"], r"GGUF model: model-q4\.gguf"),
        (["adapter_model.safetensors", "adapter_config.json"], "LoRA adapter"),
        (["adapter_model.bin", "adapter_config.json"], "LoRA adapter"),
        (["tf_model.h5", "config.json"], "another format"),
        (["config.json", "tokenizer.json"], "config.json, tokenizer.json"),
        ([f"file{i}.txt" for i in range(99)], "and 89 more"),
    ],
)
def test_no_weights_says_what_is_there_instead(keys: list[str], says: str) -> None:
    with pytest.raises(NoWeightsError, match=says) as caught:
        files(keys)
    assert ROOT in str(caught.value)
    assert caught.value.hint
