"""What a model may do with lazy tensors, and what happens where they are not enough."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fastload_common.config import Settings
from fastload_common.errors import (
    TensorMismatchError,
    TraceError,
)
from tests.common.load.session_harness import Model, Weights, load


def test_what_lazy_tensors_cannot_do_is_done_with_real_ones(
    directory: Path,
    settings: Settings,
    tensors: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model(tensors)

    def picky(weights: Weights) -> None:
        for name, weight in weights:
            if type(weight) is not torch.Tensor:
                raise TypeError("a kernel that wants a plain tensor")
            model.parameter(name).data.copy_(weight)

    session = load(directory, settings, model, picky)
    assert model.holds(tensors)
    assert session.report.eager_reason == "not traceable: TypeError"
    assert "could not be traced" in caplog.text


@pytest.mark.parametrize("error", [MemoryError("no room"), torch.OutOfMemoryError("no room")])
def test_want_of_memory_is_no_reason_to_read_again(
    error: Exception, directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    passes = []

    def exhausting(weights: Weights) -> None:
        passes.append(next(iter(weights))[0])
        raise error

    with pytest.raises(type(error), match="no room"):
        load(directory, settings, Model(tensors), exhausting)
    assert len(passes) == 1


def test_a_shape_changed_in_place_is_read_eagerly(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    model = Model(tensors)

    def transposing(weights: Weights) -> None:
        for name, weight in weights:
            weight.t_()
            model.parameter(name).data.copy_(weight.t())

    session = load(directory, settings, model, transposing)
    assert model.holds(tensors)
    assert session.report.eager_reason is not None


def test_inference_mode_switched_on_for_each_tensor(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    """torch forbids views of a tensor from outside; then the tensors are real ones."""
    model = Model(tensors)

    def switching(weights: Weights) -> None:
        for name, weight in weights:
            with torch.inference_mode():
                model.parameter(name).data.copy_(weight.t().t())

    load(directory, settings, model, switching)
    assert model.holds(tensors)


def test_weight_loaders_in_a_thread_pool(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    """Some models submit each tensor to a pool and go on."""
    model = Model(tensors)

    def pooling(weights: Weights) -> None:
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(model.parameter(name).data.copy_, weight) for name, weight in weights
            ]
        for job in jobs:
            job.result()

    session = load(directory, settings, model, pooling)
    assert model.holds(tensors)
    assert session.report.eager_reason is None


def test_nothing_in_the_model_stays_lazy(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    model = Model(tensors)
    kept: dict[str, torch.Tensor] = {}

    def keeping(weights: Weights) -> None:
        for name, weight in weights:
            if name == "layers.0.weight":
                model.plain = weight
            elif name == "layers.1.weight":
                model.taken = torch.nn.Parameter(weight, requires_grad=False)
            elif name == "layers.2.weight":
                model.register_buffer("buffer", weight[:3])
            elif name == "layers.3.weight":
                kept["itself"] = weight
                kept["computed"] = (weight * 3)[1:]
            else:
                model.parameter(name).data.copy_(weight)

    load(directory, settings, model, keeping)
    assert type(model.plain) is torch.Tensor
    assert torch.equal(model.plain, tensors["layers.0.weight"])
    assert type(model.taken) is torch.nn.Parameter
    assert torch.equal(model.taken, tensors["layers.1.weight"])
    assert type(model.buffer) is torch.Tensor
    assert torch.equal(model.buffer, tensors["layers.2.weight"][:3])
    # Outside the modules it is still a lazy tensor, with its value behind it.
    assert torch.equal(kept["itself"] * 2, tensors["layers.3.weight"] * 2)
    assert torch.equal(kept["computed"] + 0, (tensors["layers.3.weight"] * 3)[1:])


def test_a_kept_parameter_stays_shared_and_keeps_its_attributes(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    model = Model(tensors)

    def sharing(weights: Weights) -> None:
        for name, weight in weights:
            if name == "layers.0.weight":
                param = torch.nn.Parameter(weight, requires_grad=False)
                param.weight_loader = sharing  # type: ignore[attr-defined]
                model.one = param
                model.rows.other = param
            else:
                model.parameter(name).data.copy_(weight)

    load(directory, settings, model, sharing)
    assert type(model.one) is torch.nn.Parameter
    assert model.one is model.rows.other
    assert model.one.weight_loader is sharing  # type: ignore[attr-defined]


def test_a_loaded_tensor_taken_over_in_another_thread_is_refused(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    model = Model(tensors)

    def taking(weights: Weights) -> None:
        with ThreadPoolExecutor(1) as pool:
            for name, weight in weights:
                pool.submit(setattr, model.parameter(name), "data", weight).result()

    with pytest.raises(TraceError, match="another thread"):
        load(directory, settings, model, taking)


@pytest.mark.parametrize(
    "change",
    [
        lambda param: param.data.add_(1),
        lambda param: setattr(param, "data", param.data * 2),
    ],
)
def test_a_loader_that_changed_parameters_is_not_run_again(
    change: Callable[[torch.nn.Parameter], object],
    directory: Path,
    settings: Settings,
    tensors: dict[str, torch.Tensor],
) -> None:
    model = Model(tensors)

    def changing(weights: Weights) -> None:
        for name, weight in weights:
            change(model.parameter(name))
            weight.t_()

    with pytest.raises(TraceError, match="cannot be run again") as caught:
        load(directory, settings, model, changing)
    assert "FASTLOAD_TRACE=eager" in str(caught.value)


def test_a_lazy_tensor_used_too_late_says_so(
    directory: Path, settings: Settings, tensors: dict[str, torch.Tensor]
) -> None:
    kept: list[torch.Tensor] = []
    model = Model(tensors)

    def failing(weights: Weights) -> None:
        kept.append(next(iter(weights))[1])
        raise AssertionError("no")

    with pytest.raises(TensorMismatchError):
        load(directory, settings, model, failing)
    with pytest.raises(TraceError, match="after its load"):
        kept[0].sum()
