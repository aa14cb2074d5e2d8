"""Whole loads from the real S3 server, compared with the checksums that it keeps."""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.config import Settings, load_settings
from fastload_common.errors import ChecksumMismatchError, ConfigError, ObjectChangedError
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.testing.s3_server import S3Server
from tests.common.load.conftest import use_server
from tests.common.load.lying_proxy import LyingProxy
from tests.common.load.session_harness import Model, Weights

pytestmark = pytest.mark.s3

FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def settings_for(verify: str, **more: str) -> Settings:
    extra = {"progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "1MiB", "verify": verify}
    return load_settings(extra | more, {})


@dataclass
class Stored:
    """Two shards on the server, and the proxy through which the loads see them."""

    uri: str
    proxy: LyingProxy
    client: Any
    bucket: str
    prefix: str
    sizes: dict[str, int]

    def load(
        self,
        settings: Settings,
        model: Model,
        consume: Callable[[Weights], object] | None = None,
    ) -> LoadSession:
        with LoadSession([WeightSource(self.uri)], settings) as session:
            session.load(model, consume or model.load_weights)
        return session

    def counts(self, session: LoadSession) -> tuple[int, int, int, int]:
        """Compared, without checksum, partly read, bytes read for it."""
        found = dict(session.report.verified)
        found.pop("mode")
        return (
            found.pop("compared"),
            found.pop("without_checksum"),
            found.pop("partly_read"),
            found.pop("read_bytes"),
        )


@pytest.fixture
def large(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of several chunks, and with sizes that are multiples of nothing."""
    generator = torch.Generator().manual_seed(1)
    more = {
        f"wide.{k}": torch.randn(301 + k, 333, generator=generator).to(torch.bfloat16)
        for k in range(4)
    }
    return {**tensors, **more}


MakeStored = Callable[..., Stored]


@pytest.fixture
def store(
    s3_server: S3Server,
    load_bucket: str,
    tmp_path: Path,
    large: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeStored]:
    """Uploads the model with checksums of one algorithm (None: with none)."""
    use_server(s3_server, monkeypatch)
    with LyingProxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

        def make(algorithm: str | None = "CRC64NVME") -> Stored:
            prefix = uuid.uuid4().hex
            names = sorted(large)
            client = s3_server.client()
            sizes = {}
            for file, part in zip(FILES, (names[::2], names[1::2]), strict=True):
                path = tmp_path / file
                save_file({name: large[name] for name in part}, path)
                chosen = {"ChecksumAlgorithm": algorithm} if algorithm else {}
                body = path.read_bytes()
                client.put_object(Bucket=load_bucket, Key=f"{prefix}/{file}", Body=body, **chosen)
                sizes[file] = len(body)
            uri = f"s3://{load_bucket}/{prefix}"
            return Stored(uri, proxy, client, load_bucket, prefix, sizes)

        yield make


@pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32C", "CRC32"])
@pytest.mark.parametrize("verify", ["covered", "full"])
def test_right_bytes_pass_without_a_byte_more(
    verify: str, algorithm: str, store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store(algorithm)
    model = Model(large)
    session = stored.load(settings_for(verify), model)
    assert model.holds(large)
    assert stored.counts(session) == (2, 0, 0, 0)
    assert session.report.verified["mode"] == verify
    assert "2 of 2 objects compared with their checksum" in session.report.summary_line()
    assert stored.proxy.asked_for_checksums() == 2


def test_off_asks_and_says_nothing(store: MakeStored, large: dict[str, torch.Tensor]) -> None:
    stored = store()
    stored.proxy.flips[FILES[0]] = (stored.sizes[FILES[0]] - 1, 0)
    session = stored.load(settings_for("off"), Model(large))
    assert stored.proxy.asked_for_checksums() == 0
    assert session.report.verified == {}
    assert session.report.phases_s["verify"] == 0
    assert "checksum" not in session.report.summary_line()


@pytest.mark.parametrize("trace", ["lazy", "eager"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_flipped_bit_ends_the_load(
    place: str, trace: str, store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    file = FILES[1]
    header_bytes = 8 + int.from_bytes(stored_bytes(stored, file)[:8], "little")
    size_bytes = stored.sizes[file]
    at = {"first": header_bytes, "middle": size_bytes // 2, "last": size_bytes - 1}[place]
    # The header is read ahead with some of the data, which is not used: hit the later reply too.
    stored.proxy.flips[file] = (at, 0)
    with pytest.raises(ChecksumMismatchError) as caught:
        stored.load(settings_for("covered", trace=trace), Model(large))
    error = caught.value
    assert error.fields["uri"].endswith(file)
    assert error.fields["algorithm"] == "CRC64NVME"
    assert error.fields["expected"] != error.fields["computed"]
    assert all(str(error.fields[name]) in error.what for name in ("uri", "expected", "computed"))
    assert "load again" in str(error)
    assert not error.retryable


def stored_bytes(stored: Stored, file: str) -> bytes:
    reply = stored.client.get_object(Bucket=stored.bucket, Key=f"{stored.prefix}/{file}")
    data: bytes = reply["Body"].read()
    return data


def test_a_flipped_bit_in_a_header_is_found(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    """One that leaves a valid header: a tensor has another name, and its parameter no value."""
    stored = store()
    stored.proxy.flips[FILES[0]] = (stored_bytes(stored, FILES[0]).index(b"layers."), 0)
    model = Model(large)

    def take_known(weights: Weights) -> None:
        for name, weight in weights:
            if name in large:
                model.parameter(name).data.copy_(weight)

    with pytest.raises(ChecksumMismatchError, match=FILES[0]):
        stored.load(settings_for("full"), model, take_known)


def test_a_flipped_bit_in_the_index_is_found(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    """It is read at once, so it is compared before anything else is done with it."""
    stored = store()
    names = sorted(large)
    rows = [f'"{n}": "{FILES[k % 2]}"' for k, n in enumerate(names)]
    index = ('{"metadata": {"total_size": 1}, "weight_map": {' + ", ".join(rows) + "}}").encode()
    key = f"{stored.prefix}/model.safetensors.index.json"
    stored.client.put_object(
        Bucket=stored.bucket, Key=key, Body=index, ChecksumAlgorithm="CRC64NVME"
    )
    session = stored.load(settings_for("covered"), Model(large))
    assert stored.counts(session) == (3, 0, 0, 0)
    stored.proxy.flips[key] = (index.index(b"total_size"), 0)
    with pytest.raises(ChecksumMismatchError, match=r"index\.json"):
        stored.load(settings_for("covered"), Model(large))


def halves(model: Model) -> Callable[[Weights], None]:
    """A loader that takes the first half of the rows of each wide tensor, as a rank does."""

    def load_weights(weights: Weights) -> None:
        for name, weight in weights:
            rows = weight.shape[0] // 2 if name.startswith("wide.") else weight.shape[0]
            model.parameter(name).data[:rows].copy_(weight[:rows])

    return load_weights


def test_what_is_read_in_part_is_said_and_not_compared(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    model = Model(large)
    session = stored.load(settings_for("covered", merge_gap_bytes="1KiB"), model, halves(model))
    assert stored.counts(session) == (0, 0, 2, 0)
    assert "0 of 2 objects compared" in session.report.summary_line()


def test_full_reads_the_rest_and_compares(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    settings = settings_for("full", merge_gap_bytes="1KiB")
    model = Model(large)
    session = stored.load(settings, model, halves(model))
    compared, without, partly, read_bytes = stored.counts(session)
    assert (compared, without, partly) == (2, 0, 0)
    # Exactly what the load did not need: all bytes, less what arrived in the load.
    header_bytes = sum(
        shard.header_bytes for found in session.checkpoints for shard in found.shards
    )
    whole = sum(stored.sizes.values())
    aligned_twice = 64 * 20
    fetched = session.report.fetched_bytes + header_bytes
    assert whole <= read_bytes + fetched < whole + aligned_twice
    assert session.report.needed_bytes < whole * 0.7


def test_full_finds_damage_in_what_the_load_did_not_need(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    model = Model(large)
    stored.proxy.flips[FILES[1]] = (stored.sizes[FILES[1]] - 1, 0)
    narrow = {"merge_gap_bytes": "1KiB"}
    stored.load(settings_for("covered", **narrow), model, halves(model))
    with pytest.raises(ChecksumMismatchError, match=FILES[1]):
        stored.load(settings_for("full", **narrow), model, halves(model))


def test_an_unfinished_consumer_is_no_way_around(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    stored.proxy.flips[FILES[1]] = (stored.sizes[FILES[1]] - 1, 0)

    def first_only(weights: Weights) -> None:
        next(iter(weights))

    with pytest.raises(ChecksumMismatchError):
        stored.load(settings_for("full", trace="eager"), Model(large), first_only)


def test_an_error_that_the_model_catches_still_ends_the_load(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    stored.proxy.flips[FILES[0]] = (stored.sizes[FILES[0]] - 1, 0)

    def careless(weights: Weights) -> None:
        try:
            for _, weight in weights:
                weight.float().sum().item()
        except Exception:
            logging.getLogger(__name__).info("never mind")

    with pytest.raises(ChecksumMismatchError):
        stored.load(settings_for("covered"), Model(large), careless)


def test_values_read_while_tracing_count_and_are_compared_again(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    model = Model(large)

    def peeking(weights: Weights) -> None:
        for name, weight in weights:
            assert weight[3:5].float().sum().isfinite().item()
            model.parameter(name).data.copy_(weight)

    session = stored.load(settings_for("covered"), model, peeking)
    assert model.holds(large)
    assert session.report.settled_reads > 0
    assert stored.counts(session)[:3] == (2, 0, 0)


def test_a_second_pass_counts_as_well(store: MakeStored, large: dict[str, torch.Tensor]) -> None:
    stored = store()
    model = Model(large)

    def picky(weights: Weights) -> None:
        for name, weight in weights:
            if name == "wide.3":
                weight[:7].float().sum().item()
                if type(weight) is not torch.Tensor:
                    raise TypeError("a kernel that wants a plain tensor")
            model.parameter(name).data.copy_(weight)

    session = stored.load(settings_for("covered"), model, picky)
    assert model.holds(large)
    assert session.report.eager_reason == "not traceable: TypeError"
    assert stored.counts(session) == (2, 0, 0, 0)


def test_damage_in_the_second_reading_alone_is_found(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    model = Model(large)
    file = FILES[1]  # it holds wide.3
    flip = stored_bytes(stored, file).index(large["wide.3"][4].view(torch.uint8).numpy().tobytes())

    def peeking(weights: Weights) -> None:
        for name, weight in weights:
            if name == "wide.3":
                weight[3:5].float().sum().item()
            model.parameter(name).data.copy_(weight)

    stored.proxy.flips[file] = (flip, 1)
    with pytest.raises(ChecksumMismatchError, match=f"{file} (was read twice|is not what)"):
        stored.load(settings_for("covered"), model, peeking)


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
    store: MakeStored,
    large: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = store()
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
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    """As the server itself says it."""
    from boto3.s3.transfer import TransferConfig

    stored = store()
    for file in FILES:
        data = io.BytesIO(stored_bytes(stored, file))
        key = f"{stored.prefix}/{file}"
        parts = TransferConfig(multipart_threshold=1)
        stored.client.upload_fileobj(data, stored.bucket, key, Config=parts)
    session = stored.load(settings_for("covered"), Model(large))
    assert stored.counts(session) == (0, 2, 0, 0)


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_a_store_that_refuses_to_tell_is_no_error(
    status: int,
    store: MakeStored,
    large: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored = store()
    stored.proxy.refuses = status
    with caplog.at_level(logging.WARNING):
        session = stored.load(settings_for("covered"), Model(large))
    assert stored.counts(session) == (0, 2, 0, 0)
    told = [r for r in caplog.records if "checksums cannot be had" in r.getMessage()]
    assert len(told) == 1
    assert str(status) in told[0].getMessage()


@pytest.mark.parametrize("status", [412, 404])
def test_a_store_that_has_another_object_by_now_ends_the_load(
    status: int, store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    stored.proxy.refuses = status
    with pytest.raises(ObjectChangedError) as caught:
        stored.load(settings_for("covered"), Model(large))
    assert "model-0000" in str(caught.value)


def test_a_gateway_that_ignores_the_condition_is_noticed(
    store: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = store()
    stored.proxy.heads = {"etag": '"another"'}
    with pytest.raises(ObjectChangedError) as caught:
        stored.load(settings_for("covered"), Model(large))
    assert "model-0000" in str(caught.value)


def test_a_missing_package_is_said_before_anything_is_loaded(
    store: MakeStored, large: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("awscrt.checksums.crc64nvme")
    stored = store()
    model = Model(large)
    with pytest.raises(ConfigError, match=r"CRC64NVME.*fastload\[verify\]"):
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
