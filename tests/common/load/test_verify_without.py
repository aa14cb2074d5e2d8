"""Loads of objects that have no checksum of the whole, or whose store does not tell it."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch

from fastload_common.errors import ConfigError, ObjectChangedError
from fastload_common.load.session import LoadSession, WeightSource
from tests.common.load.session_harness import Model
from tests.common.load.verify_store import FILES, MakeStored, settings_for

pytestmark = pytest.mark.s3


@pytest.mark.parametrize(
    "heads",
    [
        {"x-amz-checksum-crc64nvme": None},
        {"x-amz-checksum-type": "COMPOSITE"},
        {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA=-2"},
        {"x-amz-checksum-crc64nvme": "!!!"},
        {"x-amz-checksum-crc64nvme": "AAAA"},
    ],
    ids=["none", "composite", "of parts", "no base64", "too short"],
)
def test_what_has_no_checksum_of_the_whole_is_not_compared(
    heads: dict[str, str | None],
    stored_model: MakeStored,
    large: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = stored_model()
    stored.proxy.heads = heads
    model = Model(large)
    with caplog.at_level(logging.WARNING):
        session = stored.load(settings_for("full"), model)
    assert model.holds(large)
    assert stored.counts(session) == (0, 2, 0, 0)
    warnings = [r.getMessage() for r in caplog.records if "FASTLOAD_VERIFY" in r.getMessage()]
    assert len(warnings) == 1
    assert "2 of 2 objects have no stored checksum" in warnings[0]


def test_what_was_uploaded_in_parts_is_not_compared(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    """As the server itself says it."""
    from boto3.s3.transfer import TransferConfig

    stored = stored_model()
    for file in FILES:
        data = io.BytesIO(stored.data(file))
        key = f"{stored.prefix}/{file}"
        parts = TransferConfig(multipart_threshold=1)
        stored.client.upload_fileobj(data, stored.bucket, key, Config=parts)
    session = stored.load(settings_for("covered"), Model(large))
    assert stored.counts(session) == (0, 2, 0, 0)


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_a_store_that_refuses_to_tell_is_no_error(
    status: int,
    stored_model: MakeStored,
    large: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = stored_model()
    stored.proxy.refuses = status
    with caplog.at_level(logging.WARNING):
        session = stored.load(settings_for("covered"), Model(large))
    assert stored.counts(session) == (0, 2, 0, 0)
    told = [r for r in caplog.records if "checksums cannot be had" in r.getMessage()]
    assert len(told) == 1
    assert str(status) in told[0].getMessage()


@pytest.mark.parametrize("status", [412, 404])
def test_a_store_that_has_another_object_by_now_ends_the_load(
    status: int, stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    stored.proxy.refuses = status
    with pytest.raises(ObjectChangedError) as caught:
        stored.load(settings_for("covered"), Model(large))
    assert "model-0000" in str(caught.value)


def test_a_gateway_that_ignores_the_condition_is_noticed(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    stored.proxy.heads = {"etag": '"another"'}
    with pytest.raises(ObjectChangedError) as caught:
        stored.load(settings_for("covered"), Model(large))
    assert "model-0000" in str(caught.value)


def test_a_missing_package_is_said_before_anything_is_loaded(
    stored_model: MakeStored, large: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = stored_model()
    monkeypatch.delattr("awscrt.checksums.crc64nvme")
    model = Model(large)
    with pytest.raises(ConfigError, match=r"CRC64NVME.*pip install awscrt"):
        stored.load(settings_for("covered"), model)
    assert model.untouched(large)
    assert stored.load(settings_for("off"), model).report.status == "ok"


def test_files_have_no_checksums(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    model = Model(tensors)
    with LoadSession([WeightSource(str(directory))], settings_for("full")) as session:
        session.load(model, model.load_weights)
    assert model.holds(tensors)
    assert session.report.verified["without_checksum"] == 1
    assert session.report.verified["read_bytes"] == 0
