"""Whole loads by several ranks of one process: the same weights, and each byte fetched once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload_common.errors import (
    ChecksumMismatchError,
    ConfigError,
    DeadlineError,
    FastloadError,
    PeerError,
    TensorMismatchError,
)
from fastload_common.exchange.node_exchange import NodeExchange
from fastload_common.load import executor, sharing
from fastload_common.load.executor import Executor
from fastload_common.load.session import LoadSession, WeightSource
from fastload_common.ranges import ByteRange
from fastload_common.testing.rig import Fault, Flip, Rig, Stall
from tests.common.exchange.exchange_harness import (
    Board,
    Outcome,
    SlicedModel,
    Weights,
    load_ranks,
    settings_of,
)

Tensors = dict[str, torch.Tensor]

# Behind what each rank reads of an object for its header.
BODY = ByteRange(140_000, 200_000)


@pytest.fixture
def uri(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint on the S3 server."""
    for name, value in rig.environ().items():
        monkeypatch.setenv(name, value)
    return "s3://models/m"


def all_is_right(outcomes: list[Outcome], tensors: Tensors) -> None:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.model.faults(tensors) == []


def fetched_bytes(outcomes: list[Outcome]) -> int:
    return sum(outcome.report.fetched_bytes for outcome in outcomes)


def size_of(tensors: Tensors) -> int:
    return sum(value.nbytes for value in tensors.values())


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_byte_is_fetched_once(checkpoint: Path, tensors: Tensors, size: int) -> None:
    outcomes = load_ranks(str(checkpoint), size, settings_of())
    all_is_right(outcomes, tensors)
    assert size_of(tensors) <= fetched_bytes(outcomes) + 1024 * size
    assert fetched_bytes(outcomes) <= 1.01 * size_of(tensors)
    for outcome in outcomes:
        node = outcome.report.node
        assert (node["ranks"], node["exchange"], node["reason"]) == (size, "on", None)
        assert node["node_fetched_bytes"] == fetched_bytes(outcomes)
        assert 0 < node["received_bytes"] < size_of(tensors)
        assert node["fetched_for_others_bytes"] <= outcome.report.fetched_bytes
        assert outcome.report.needed_bytes < size_of(tensors)
        assert f" from {size - 1} other ranks of this host" in outcome.report.summary_line()


def test_alone_each_rank_fetches_what_it_needs_itself(
    checkpoint: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        outcomes = load_ranks(str(checkpoint), 2, settings_of(exchange="off"))
    all_is_right(outcomes, tensors)
    assert fetched_bytes(outcomes) > 1.5 * size_of(tensors)
    for outcome in outcomes:
        assert outcome.report.node == {
            "ranks": 2,
            "exchange": "off",
            "reason": "FASTLOAD_EXCHANGE=off",
        }
    assert caplog.text.count("FASTLOAD_EXCHANGE=off") == 1


def test_one_rank_by_itself_exchanges_nothing_and_says_nothing(
    checkpoint: Path, tensors: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        outcomes = load_ranks(str(checkpoint), 1, settings_of())
    all_is_right(outcomes, tensors)
    assert outcomes[0].report.node == {}
    said = [record for record in caplog.records if "exchange" in record.name]
    assert said == []
    assert "other rank" not in caplog.text


def test_a_rank_that_reads_eagerly_leaves_the_others_to_exchange(
    checkpoint: Path, tensors: Tensors
) -> None:
    settings = [settings_of(), settings_of(trace="eager"), settings_of()]
    outcomes = load_ranks(str(checkpoint), 3, settings)
    all_is_right(outcomes, tensors)
    assert outcomes[1].report.fetched_bytes >= size_of(tensors)
    assert outcomes[1].report.node["received_bytes"] == 0
    others = outcomes[0].report, outcomes[2].report
    assert sum(report.fetched_bytes for report in others) <= 1.01 * size_of(tensors)


def test_a_rank_that_cannot_trace_goes_on_alone(checkpoint: Path, tensors: Tensors) -> None:
    def consume(model: SlicedModel) -> Callable[[Weights], object]:
        def odd(weights: Weights) -> object:
            def all_real(rows: Weights) -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in rows:
                    if type(tensor) is not torch.Tensor:
                        raise RuntimeError("this loader takes real tensors only")
                    yield name, tensor

            return model.load_weights(all_real(weights) if model.rank == 1 else weights)

        return odd

    outcomes = load_ranks(str(checkpoint), 3, settings_of(), consume=consume)
    all_is_right(outcomes, tensors)
    assert outcomes[1].report.eager_reason == "not traceable: RuntimeError"
    assert outcomes[0].report.eager_reason is None


def test_a_rank_that_fails_while_placing_drains_and_reads_alone(
    checkpoint: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Executor._place

    def failing(self: Any, data: Any, readers: Any, owners: Any, missing: Any) -> None:
        if self._report.rank == 1 and self._exchange is not None and self._timed:
            self.placed = getattr(self, "placed", 0) + 1
            if self.placed == 3:
                raise RuntimeError("a copy that torch refuses")
        place(self, data, readers, owners, missing)

    monkeypatch.setattr(Executor, "_place", failing)
    outcomes = load_ranks(str(checkpoint), 3, settings_of())
    all_is_right(outcomes, tensors)
    assert outcomes[1].report.eager_reason == "not traceable: RuntimeError"
    assert outcomes[0].report.node["node_fetched_bytes"] <= 1.01 * size_of(tensors)


@pytest.mark.parametrize("exchange", ["auto", "off"])
def test_all_ranks_that_fail_while_placing_read_alone(
    checkpoint: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    """Their errors, with all that their tracebacks hold, are alive while they read on."""
    failing = {0, 1}
    place = Executor._place

    def fails_once(self: Any, *args: Any) -> None:
        if self._report.rank in failing:
            failing.remove(self._report.rank)
            raise RuntimeError("a copy that torch refuses")
        place(self, *args)

    monkeypatch.setattr(Executor, "_place", fails_once)
    outcomes = load_ranks(str(checkpoint), 2, settings_of(exchange=exchange))
    all_is_right(outcomes, tensors)
    assert [o.report.eager_reason for o in outcomes] == ["not traceable: RuntimeError"] * 2


def test_values_read_while_tracing_are_read_alone(checkpoint: Path, tensors: Tensors) -> None:
    def consume(model: SlicedModel) -> Callable[[Weights], object]:
        def peeks(weights: Weights) -> object:
            def looked(rows: Weights) -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in rows:
                    if name.endswith("norm") and model.rank == 0:
                        assert float(tensor[3]) == float(tensors[name][3])
                    yield name, tensor

            return model.load_weights(looked(weights))

        return peeks

    outcomes = load_ranks(str(checkpoint), 2, settings_of(), consume=consume)
    all_is_right(outcomes, tensors)
    assert outcomes[0].report.settled_reads == 3


def test_reading_tensors_for_a_reload_needs_nobody(checkpoint: Path, tensors: Tensors) -> None:
    board = Board(2)
    found: dict[int, Tensors] = {}

    def rank(number: int) -> None:
        source = [WeightSource(str(checkpoint))]
        with LoadSession(source, settings_of(), group=board.group(number)) as session:
            found[number] = dict(session.tensors())

    threads = [threading.Thread(target=rank, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in (0, 1):
        assert found[number].keys() == tensors.keys()
        assert all(torch.equal(found[number][name], value) for name, value in tensors.items())


def test_an_error_of_one_rank_ends_all(checkpoint: Path, tensors: Tensors) -> None:
    models = [SlicedModel(k, 3) for k in range(3)]
    models[2].fail_at, models[2].error = "layers.1.norm", KeyError("no such parameter")
    outcomes = load_ranks(str(checkpoint), 3, settings_of(), models=models)
    assert isinstance(outcomes[2].error, TensorMismatchError)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, PeerError)
        assert "rank 2 (pid" in str(outcome.error)
        assert "could not take tensor 'layers.1.norm'" in str(outcome.error)
        assert outcome.report.status == "failed"
    ends = [outcome.ended_s for outcome in outcomes]
    assert max(ends) - min(ends) < 5


def test_an_error_before_the_trace_ends_all(checkpoint: Path) -> None:
    settings = [settings_of(), settings_of(memory_bytes="1MiB", chunk_bytes="1MiB")]
    outcomes = load_ranks(str(checkpoint), 2, settings)
    assert type(outcomes[1].error).__name__ == "OutOfBudgetError"
    assert isinstance(outcomes[0].error, PeerError)
    assert "OutOfBudgetError" in str(outcomes[0].error)


def test_the_deadline_ends_all(checkpoint: Path, uri: str, rig: Rig) -> None:
    rig.arrange([Fault(Stall(0), byte_range=BODY)])
    outcomes = load_ranks(uri, 2, settings_of(deadline_s=2.0))
    kinds = {type(outcome.error) for outcome in outcomes}
    assert DeadlineError in kinds
    assert kinds <= {DeadlineError, PeerError}


@pytest.mark.parametrize("mode", ["covered", "full"])
def test_with_verify_each_object_is_compared_by_one_rank(
    uri: str, tensors: Tensors, mode: str
) -> None:
    outcomes = load_ranks(uri, 3, settings_of(verify=mode))
    all_is_right(outcomes, tensors)
    verified = [outcome.report.verified for outcome in outcomes]
    assert sum(row["compared"] for row in verified) == 2
    assert sum(row["partly_read"] for row in verified) == 0
    assert fetched_bytes(outcomes) <= 1.01 * size_of(tensors)


def test_with_verify_full_what_nobody_needs_is_read_by_one_rank(
    uri: str, tensors: Tensors, checkpoint: Path
) -> None:
    first = sorted(tensors)[::2]

    def consume(model: SlicedModel) -> Callable[[Weights], object]:
        return lambda weights: model.load_weights(row for row in weights if row[0] in first)

    outcomes = load_ranks(uri, 3, settings_of(verify="full"), consume=consume)
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.model.faults({name: tensors[name] for name in first}) == []
    verified = [outcome.report.verified for outcome in outcomes]
    assert sum(row["compared"] for row in verified) == 2
    read = sum(row["read_bytes"] for row in verified)
    second = sum(value.nbytes for name, value in tensors.items() if name not in first)
    assert second <= read <= second + 64 * 1024


def test_damage_ends_all_ranks(uri: str, rig: Rig, tensors: Tensors) -> None:
    rig.arrange([Fault(Flip(BODY.start + 100), byte_range=BODY)])
    outcomes = load_ranks(uri, 3, settings_of(verify="covered"))
    kinds = [type(outcome.error) for outcome in outcomes]
    assert ChecksumMismatchError in kinds
    assert set(kinds) <= {ChecksumMismatchError, PeerError}
    assert all("is not what was stored" in str(outcome.error) for outcome in outcomes)


def test_the_setting_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match="expected one of auto, off"):
        settings_of(exchange="on")


def test_with_verify_a_rank_that_reads_eagerly_compares_what_it_reads(
    uri: str, tensors: Tensors
) -> None:
    settings = [settings_of(verify="full"), settings_of(verify="full", trace="eager")]
    outcomes = load_ranks(uri, 2, settings)
    all_is_right(outcomes, tensors)
    assert [outcome.report.verified["compared"] for outcome in outcomes] == [2, 2]


def test_a_rank_that_cannot_begin_is_gone_for_the_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of descriptors, say; its sockets do not live on."""
    made = NodeExchange

    def refused(met: Any, *args: Any, **more: Any) -> Any:
        if met.own.rank == 1:
            raise OSError(24, "Too many open files")
        return made(met, *args, **more)

    monkeypatch.setattr(sharing, "NodeExchange", refused)
    outcomes = load_ranks(str(checkpoint), 2, settings_of())
    assert isinstance(outcomes[1].error, OSError)
    assert isinstance(outcomes[0].error, PeerError)


def test_a_plan_that_lacks_bytes_is_an_error_and_no_reason_to_load_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*args: object) -> object:
        raise ValueError("the chunks do not hold all bytes of read 7")

    monkeypatch.setattr(executor, "plan_for", lacks)
    ended = load_ranks(str(checkpoint), 2, settings_of())
    assert {type(row.error) for row in ended} <= {FastloadError, PeerError}
    assert all("do not hold all bytes of read 7" in str(row.error) for row in ended)
