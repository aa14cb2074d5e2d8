"""Whole loads from the real S3 server, compared with the checksums that it keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from fastload_common.errors import ChecksumMismatchError
from tests.common.load.session_harness import Model, Weights
from tests.common.load.verify_store import FILES, MakeStored, settings_for

pytestmark = pytest.mark.s3


@pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32C", "CRC32"])
@pytest.mark.parametrize("verify", ["covered", "full"])
def test_right_bytes_pass_without_a_byte_more(
    verify: str, algorithm: str, stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model(algorithm)
    model = Model(large)
    session = stored.load(settings_for(verify), model)
    assert model.holds(large)
    assert stored.counts(session) == (2, 0, 0, 0)
    assert session.report.verified["mode"] == verify
    assert "2 of 2 objects compared with their checksum" in session.report.summary_line()
    assert stored.proxy.asked_for_checksums() == 2


def test_off_asks_and_says_nothing(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    stored.proxy.flips[FILES[0]] = (stored.sizes[FILES[0]] - 1, 0)
    session = stored.load(settings_for("off"), Model(large))
    assert stored.proxy.asked_for_checksums() == 0
    assert session.report.verified == {}
    assert session.report.phases_s["verify"] == 0
    assert "checksum" not in session.report.summary_line()


@pytest.mark.parametrize("trace", ["lazy", "eager"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_flipped_bit_ends_the_load(
    place: str, trace: str, stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    file = FILES[1]
    header_bytes = 8 + int.from_bytes(stored.data(file)[:8], "little")
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


def test_a_flipped_bit_in_a_header_is_found(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    """One that leaves a valid header: a tensor has another name, and its parameter no value."""
    stored = stored_model()
    stored.proxy.flips[FILES[0]] = (stored.data(FILES[0]).index(b"layers."), 0)
    model = Model(large)

    def take_known(weights: Weights) -> None:
        for name, weight in weights:
            if name in large:
                model.parameter(name).data.copy_(weight)

    with pytest.raises(ChecksumMismatchError, match=FILES[0]):
        stored.load(settings_for("full"), model, take_known)


def test_a_flipped_bit_in_the_index_is_found(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    """It is read at once, so it is compared before anything else is done with it."""
    stored = stored_model()
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
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    model = Model(large)
    session = stored.load(settings_for("covered", merge_gap_bytes="1KiB"), model, halves(model))
    assert stored.counts(session) == (0, 0, 2, 0)
    assert "0 of 2 objects compared" in session.report.summary_line()


def test_full_reads_the_rest_and_compares(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
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
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    model = Model(large)
    stored.proxy.flips[FILES[1]] = (stored.sizes[FILES[1]] - 1, 0)
    narrow = {"merge_gap_bytes": "1KiB"}
    stored.load(settings_for("covered", **narrow), model, halves(model))
    with pytest.raises(ChecksumMismatchError, match=FILES[1]):
        stored.load(settings_for("full", **narrow), model, halves(model))


def test_an_unfinished_consumer_is_no_way_around(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    stored.proxy.flips[FILES[1]] = (stored.sizes[FILES[1]] - 1, 0)

    def first_only(weights: Weights) -> None:
        next(iter(weights))

    with pytest.raises(ChecksumMismatchError):
        stored.load(settings_for("full", trace="eager"), Model(large), first_only)


def test_an_error_that_the_model_catches_still_ends_the_load(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
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
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    model = Model(large)

    def peeking(weights: Weights) -> None:
        for name, weight in weights:
            assert weight[3:5].float().sum().isfinite().item()
            model.parameter(name).data.copy_(weight)

    session = stored.load(settings_for("covered"), model, peeking)
    assert model.holds(large)
    assert session.report.settled_reads > 0
    assert stored.counts(session) == (2, 0, 0, 0)


def test_a_second_pass_counts_as_well(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    model = Model(large)

    def picky(weights: Weights) -> None:
        for name, weight in weights:
            if name == "wide.3":
                weight[:7].float().sum().item()
                if type(weight) is not torch.Tensor:
                    raise TypeError("a kernel that wants a plain tensor")
            model.parameter(name).data.copy_(weight)

    session = stored.load(settings_for("covered", memory_bytes="4MiB"), model, picky)
    assert model.holds(large)
    assert session.report.eager_reason == "not traceable: TypeError"
    assert stored.counts(session) == (2, 0, 0, 0)


def test_damage_in_the_second_reading_alone_is_found(
    stored_model: MakeStored, large: dict[str, torch.Tensor]
) -> None:
    stored = stored_model()
    model = Model(large)
    file = FILES[1]  # it holds wide.3
    flip = stored.data(file).index(large["wide.3"][4].view(torch.uint8).numpy().tobytes())

    def peeking(weights: Weights) -> None:
        for name, weight in weights:
            if name == "wide.3":
                weight[3:5].float().sum().item()
            model.parameter(name).data.copy_(weight)

    stored.proxy.flips[file] = (flip, 1)
    with pytest.raises(ChecksumMismatchError, match=f"{file} (was read twice|is not what)"):
        stored.load(settings_for("covered"), model, peeking)
