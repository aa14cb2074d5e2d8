"""Whole loads by several ranks, with a node cache: what comes from it, and what from the store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from fastload_common.errors import ChecksumMismatchError
from fastload_common.ranges import ByteRange
from fastload_common.testing.rig import Fault, Flip, Rig
from fastload_common.units import MIB
from tests.common.exchange.exchange_harness import SlicedModel, load_ranks, settings_of
from tests.common.range_cache.conftest import all_right, fetched, files, load, sent, size_of, total

Tensors = dict[str, torch.Tensor]

# Behind what is read of an object for its header.
BODY = ByteRange(1_000_000, 2_000_000)


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2), (1, 3)])
def test_the_next_load_reads_from_the_disk_at_any_number_of_ranks(
    rig: Rig, root: Path, tensors: Tensors, first: int, second: int
) -> None:
    outcomes = load(root, first)
    all_right(outcomes, tensors)
    assert total(outcomes, "dropped_bytes") == 0
    assert total(outcomes, "kept_bytes") >= 0.98 * size_of(tensors)
    assert sent(rig) >= size_of(tensors)
    outcomes = load(root, second)
    all_right(outcomes, tensors)
    assert sent(rig) == 0
    assert fetched(outcomes) == 0
    assert sum(outcome.report.requests for outcome in outcomes) == 0
    assert size_of(tensors) <= total(outcomes, "read_bytes") <= 1.2 * size_of(tensors)
    assert "from the node cache" in outcomes[0].report.summary_line()


def test_what_is_deleted_comes_from_the_store_again(rig: Rig, root: Path, tensors: Tensors) -> None:
    load(root, 2)
    sent(rig)
    gone = files(root)[0]
    size_bytes = gone.stat().st_size
    for suffix in (".data", ".journal", ".json"):
        gone.with_suffix(suffix).unlink()
    outcomes = load(root, 4)
    all_right(outcomes, tensors)
    missing_bytes = sent(rig)
    # Headers are read by each rank.
    assert size_bytes <= missing_bytes <= size_bytes + 4 * 128 * 1024
    assert size_bytes - 128 * 1024 <= fetched(outcomes) <= size_bytes
    all_right(load(root, 3), tensors)
    assert sent(rig) == 0


@pytest.mark.parametrize("suffix", [".data", ".journal"])
def test_half_of_a_file_costs_the_other_half(
    rig: Rig, root: Path, tensors: Tensors, suffix: str
) -> None:
    load(root, 2)
    sent(rig)
    for path in files(root, suffix):
        os.truncate(path, path.stat().st_size // 2)
    outcomes = load(root, 4)
    all_right(outcomes, tensors)
    # A block each may be lost with what was in it.
    assert abs(fetched(outcomes) - size_of(tensors) / 2) < 2.5 * MIB
    all_right(load(root, 2), tensors)
    sent(rig)
    all_right(load(root, 3), tensors)
    assert sent(rig) == 0


def test_damage_is_found_and_mended(
    rig: Rig, root: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    load(root, 2)
    sent(rig)
    for path in files(root):
        with path.open("r+b") as file:
            file.seek(BODY.start)
            file.write(b"\xff" * 3)
    outcomes = load(root, 4)
    all_right(outcomes, tensors)
    assert 2 * 3 <= total(outcomes, "damaged_bytes") <= 8 * MIB
    assert fetched(outcomes) == sent(rig) <= 2 * MIB
    assert "do not match their checksum" in caplog.text
    outcomes = load(root, 2)
    all_right(outcomes, tensors)
    assert total(outcomes, "damaged_bytes") == sent(rig) == 0


@pytest.mark.parametrize("mode", ["covered", "full"])
def test_bytes_from_the_cache_are_compared_with_the_stores_checksum(
    rig: Rig, root: Path, tensors: Tensors, checkpoint: Path, mode: str
) -> None:
    for path in checkpoint.glob("*.safetensors"):
        rig.put("models", f"m/{path.name}", path.read_bytes(), checksums=["crc64nvme"])
    rig.arrange([Fault(Flip(BODY.start + 100), "*00001*", byte_range=BODY, attempts=(1,))])
    outcomes = load(root, 2)  # nobody compares: wrong bytes are used, and kept
    assert sum(len(outcome.model.faults(tensors)) for outcome in outcomes) > 0
    held = len(files(root))
    outcomes = load(root, 2, verify=mode)
    kinds = [type(outcome.error) for outcome in outcomes]
    assert ChecksumMismatchError in kinds
    assert len(files(root)) == held - 1
    outcomes = load(root, 2, verify=mode)
    all_right(outcomes, tensors)
    assert sum(outcome.report.verified["compared"] for outcome in outcomes) == 2
    sent(rig)
    outcomes = load(root, 4, verify=mode)
    all_right(outcomes, tensors)
    assert sum(outcome.report.verified["compared"] for outcome in outcomes) == 2
    assert sent(rig) == fetched(outcomes) == 0


def test_a_changed_object_is_another_one(
    rig: Rig, root: Path, tensors: Tensors, checkpoint: Path
) -> None:
    load(root, 1)
    sent(rig)
    path = next(iter(sorted(checkpoint.glob("*.safetensors"))))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    rig.put("models", f"m/{path.name}", bytes(data))
    outcomes = load(root, 1)
    assert len(outcomes[0].model.faults(tensors)) == 1
    assert len(data) <= sent(rig) < size_of(tensors)


@pytest.mark.parametrize("etag", ['""', 'W/"x"'])
def test_an_etag_that_tells_no_states_apart_is_no_name(
    rig: Rig, root: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture, etag: str
) -> None:
    for values in (tensors, {name: value + 1 for name, value in tensors.items()}):
        rig.put("models", "one/model.safetensors", save(values), etag=etag)
        caplog.clear()
        outcomes = load(root, 1, "s3://models/one")
        all_right(outcomes, values)
        assert total(outcomes, "read_bytes") == total(outcomes, "kept_bytes") == 0
        assert "an ETag that tells no states apart" in outcomes[0].report.node_cache["reason"]
        assert len([r for r in caplog.records if "node cache" in r.getMessage()]) == 1
    assert files(root) == []


def test_eager_loads_and_values_read_early_use_it_too(
    rig: Rig, root: Path, tensors: Tensors
) -> None:
    all_right(load(root, 1, trace="eager"), tensors)
    sent(rig)

    def consume(model: SlicedModel) -> Callable[[Any], object]:
        def peeks(weights: Any) -> object:
            def looked() -> Any:
                for name, tensor in weights:
                    if name.endswith("norm"):
                        assert float(tensor[3]) == float(tensors[name][3])
                    yield name, tensor

            return model.load_weights(looked())

        return peeks

    settings = settings_of(memory_bytes="256MiB", node_cache=str(root))
    all_right(load_ranks("s3://models/m", 2, settings, consume=consume), tensors)
    assert sent(rig) == 0
    all_right(load(root, 2, exchange="off"), tensors)
    assert sent(rig) == 0


def test_directories_are_not_cached_and_off_is_off(
    root: Path, rig: Rig, checkpoint: Path, tensors: Tensors
) -> None:
    outcomes = load(root, 1, uri=str(checkpoint))
    all_right(outcomes, tensors)
    assert outcomes[0].report.node_cache == {}
    outcomes = load_ranks("s3://models/m", 1, settings_of())
    assert outcomes[0].report.node_cache == {}
    assert list(root.iterdir()) == []


def test_several_engines_at_once(rig: Rig, root: Path, tensors: Tensors) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda ranks=ranks: found.append(load(root, ranks)))
        for ranks in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for outcomes in found:
        all_right(outcomes, tensors)
        assert total(outcomes, "damaged_bytes") == 0
    sent(rig)
    outcomes = load(root, 4)
    all_right(outcomes, tensors)
    assert sent(rig) == total(outcomes, "damaged_bytes") == 0


def test_small_memory_keeps_less_and_loads_all_the_same(
    rig: Rig, root: Path, tensors: Tensors
) -> None:
    for _ in range(2):
        all_right(load(root, 2, memory_bytes="1MiB"), tensors)
