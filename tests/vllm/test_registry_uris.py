"""What vLLM is told of oci:// URIs, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from fastload_common.config import Settings
from fastload_common.engine.object_model import (
    explain_format,
    is_registry_uri,
    pin_model,
    refuse_other_stores,
)
from fastload_common.errors import ConfigError
from fastload_vllm import compat
from fastload_vllm.patches.registry_uris import PATCH


@pytest.mark.parametrize(
    ("model", "original", "wanted"),
    [
        ("oci://r/m:v", False, True),
        ("OCI://r/m:v", False, True),
        ("s3://b/m", True, True),
        ("org/model", False, False),
        ("/models/oci://x", False, False),
    ],
)
def test_no_hub_is_asked_for_a_registrys_model(model: str, original: bool, wanted: bool) -> None:
    asked: list[Any] = []

    def is_cloud_storage(model_or_path: str) -> bool:
        asked.append(model_or_path)
        return original

    assert PATCH.wrapper(is_cloud_storage, model) is wanted
    assert asked == ([] if is_registry_uri(model) else [model])


def test_another_load_format_is_told_which_one_reads_registries() -> None:
    with pytest.raises(ConfigError, match=r"reads registries.*--load-format fastload") as caught:
        explain_format(compat.ENGINE, "oci://r/m:v", "auto")
    assert "runai" not in str(caught.value)


def test_which_stores_are_read() -> None:
    refuse_other_stores("oci://r/m:v")
    refuse_other_stores("s3://b/m")
    with pytest.raises(ConfigError, match="oci://"):
        refuse_other_stores("gs://b/m")


def test_only_a_tag_is_pinned() -> None:
    """No request for what is no registry's."""
    assert pin_model("s3://b/m", Settings()) == "s3://b/m"
    assert pin_model("/models/m", Settings()) == "/models/m"
