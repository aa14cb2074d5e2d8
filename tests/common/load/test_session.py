"""A whole load over real files: what arrives, what is refused, what is left behind."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastload_common.config import Settings, load_settings
from fastload_common.errors import (
    DeadlineError,
    NoWeightsError,
    TensorMismatchError,
)
from fastload_common.load.session import LoadSession, RankPlace, WeightSource
from fastload_common.testing.fake_clock import FakeClock
from tests.common.load.session_harness import Model, Weights, load


def test_a_load_fills_the_model_and_tells_what_it_did(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    model = Model(tensors)
    place = RankPlace("test", "1.0", rank=1, world_size=2)
    with LoadSession([WeightSource(str(directory))], settings, place) as session:
        assert session.load(model, model.load_weights) == set(tensors)
    assert model.holds(tensors)
    report = session.report
    size_bytes = sum(value.nbytes for value in tensors.values())
    assert (report.status, report.rank, report.engine) == ("ok", 1, "test")
    assert report.model_bytes == report.needed_bytes == size_bytes
    assert report.fetched_bytes == size_bytes + report.over_read_bytes
    assert report.transfers == report.tensors == len(tensors)
    assert report.settled_reads == 0
    assert 0 < report.peak_staging_bytes <= 1 << 20


def test_eager_reading_gives_the_same(
    directory: Path, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_settings(
        {"trace": "eager", "progress": "off", "chunk_bytes": "64KiB", "memory_bytes": "1MiB"}, {}
    )
    model = Model(tensors)
    with caplog.at_level(logging.INFO):
        session = load(directory, settings, model)
    assert model.holds(tensors)
    assert session.report.eager_reason == "FASTLOAD_TRACE=eager"
    assert "one after the other" in caplog.text


def test_tensors_are_real_and_own_their_memory(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    with LoadSession([WeightSource(str(directory))], settings) as session:
        found = dict(session.tensors())
    assert set(found) == set(tensors)
    for name, value in found.items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, tensors[name])
        value.add_(1)  # writable, and after the session


def test_a_shape_that_does_not_fit_names_the_tensor_and_touches_nothing(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    model = Model({**tensors, "layers.11.weight": torch.zeros(3, 3)})
    with pytest.raises(TensorMismatchError) as caught:
        load(directory, settings, model)
    message = str(caught.value)
    assert "layers.11.weight" in message
    assert "[41, 16]" in message
    assert "BF16" in message
    assert "model.safetensors" in message
    assert model.untouched({n: t for n, t in tensors.items() if n != "layers.11.weight"})


@pytest.mark.parametrize("trace", ["lazy", "eager"])
def test_any_refusal_of_a_real_tensor_is_a_mismatch(
    trace: str, directory: Path, tensors: dict[str, torch.Tensor]
) -> None:
    settings = load_settings({"trace": trace, "progress": "off"}, {})

    def refusing(weights: Weights) -> None:
        for name, weight in weights:
            if name == "layers.3.weight":
                torch.zeros(2).narrow(0, 1, weight.shape[0])  # a parameter that is too small

    with pytest.raises(TensorMismatchError, match=r"layers\.3\.weight.*RuntimeError") as caught:
        load(directory, settings, Model(tensors), refusing)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_tensor_that_the_model_does_not_know_is_named(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    known = {name: value for name, value in tensors.items() if not name.startswith("layers.5.")}
    with pytest.raises(TensorMismatchError, match=r"layers\.5\.weight"):
        load(directory, settings, Model(known))


def test_several_sources_with_prefixes(tmp_path: Path, settings: Settings) -> None:
    parts = {}
    for part in ("text", "vision"):
        (tmp_path / part).mkdir()
        parts[part] = torch.randn(8, 8)
        save_file({"w": parts[part]}, tmp_path / part / "model.safetensors")
    sources = [WeightSource(str(tmp_path / part), prefix=f"{part}.") for part in parts]
    model = Model({f"{part}.w": value for part, value in parts.items()})
    with LoadSession(sources, settings) as session:
        session.load(model, model.load_weights)
    assert model.holds({f"{part}.w": value for part, value in parts.items()})


def test_a_failed_load_is_reported_and_leaves_no_thread(
    directory: Path, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "report.jsonl"
    settings = load_settings({"report": str(path), "progress": "lines"}, {})
    before = threading.active_count()
    with pytest.raises(TensorMismatchError):
        load(directory, settings, Model({}))
    load(directory, settings, Model(tensors))
    (tmp_path / "none").mkdir()
    with pytest.raises(NoWeightsError):
        load(tmp_path / "none", settings, Model({}))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["status"] for row in rows] == ["failed", "ok", "failed"]
    assert rows[0]["error"].startswith("TensorMismatchError: ")
    assert threading.active_count() == before


def test_an_error_of_the_consumer_is_its_own(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    def interrupted(weights: Weights) -> None:
        next(iter(weights))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(directory, settings, Model(tensors), interrupted)


def test_the_deadline_covers_the_trace(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    settings = load_settings({"deadline_s": 5, "progress": "off"}, {})
    clock = FakeClock()
    model = Model(tensors)

    def slow(weights: Weights) -> None:
        clock.advance(6)
        model.load_weights(weights)

    with (
        pytest.raises(DeadlineError),
        LoadSession([WeightSource(str(directory))], settings, clock=clock) as session,
    ):
        session.load(model, slow)
    assert model.untouched(tensors)
