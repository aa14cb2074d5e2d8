"""Who shares memory with whom, and what was meant when it was recorded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastload_common.errors import TraceError
from fastload_common.trace.lazy_tensor import LazyTensor
from tests.common.trace.harness import MemoryCheckpoint, arange, check, zeros

Tensors = dict[str, torch.Tensor]


def parameter(*sizes: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(sizes), requires_grad=False)


def numpy_of_a_loaded_tensor(loaded: Tensors, params: Tensors) -> None:
    params["p"].copy_(loaded["w"])
    clone = loaded["w"].clone()
    loaded["w"].numpy()[:] = 0
    params["q"].copy_(clone)


def view_of_a_read_tensor(loaded: Tensors, params: Tensors) -> None:
    total = loaded["w"] + loaded["u"]
    params["p"].copy_(loaded["w"])
    loaded["w"][0, 0].item()
    loaded["w"][0:2].zero_()
    params["q"].copy_(total)


def a_parameter_takes_over_and_changes(loaded: Tensors, params: Tensors) -> None:
    params["p"].copy_(loaded["w"])
    taken = parameter(8, 4)
    taken.data = loaded["w"]
    both = torch.cat([loaded["w"], loaded["u"]])
    taken.data.mul_(2)
    params["q"].copy_(both[4:12])


def a_parameter_gets_other_memory(loaded: Tensors, params: Tensors) -> None:
    moved, before = parameter(8, 4), torch.zeros(8, 4)
    moved.data = before
    moved.copy_(loaded["w"])
    moved.data = torch.full((8, 4), 5.0)
    params["p"].copy_(moved)
    params["q"].copy_(before)


def two_parameters_are_swapped(loaded: Tensors, params: Tensors) -> None:
    first, second = torch.zeros(8, 4), torch.ones(8, 4)
    first.copy_(loaded["w"])
    torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]
    params["p"].copy_(first)
    params["q"].copy_(second)


def a_clone_is_changed_and_so_is_its_source(loaded: Tensors, params: Tensors) -> None:
    clone = loaded["w"].clone()
    params["p"].copy_(clone)
    clone.add_(1)
    loaded["w"].neg_()
    params["q"].copy_(clone + loaded["w"])


def a_copy_is_made_of_a_parameter(loaded: Tensors, params: Tensors) -> None:
    params["p"].copy_(loaded["w"])
    params["q"].copy_(copy.deepcopy(params["p"]))
    params["p"].copy_(pickle.loads(pickle.dumps(params["q"])) * 2)


def copies_share_what_the_originals_share(loaded: Tensors, params: Tensors) -> None:
    both = copy.deepcopy({"whole": loaded["w"], "part": loaded["w"][2:4]})
    both["part"].zero_()
    params["p"].copy_(both["whole"])
    shown = copy.copy(loaded["u"])
    loaded["u"][0].zero_()
    params["q"].copy_(shown)


def a_part_of_an_odd_tensor_is_cast(loaded: Tensors, params: Tensors) -> None:
    clone = loaded["odd"].clone()
    loaded["odd"].sum().item()
    params["p"][0, :2].copy_(loaded["odd"][0:8].view(torch.float32))
    params["p"][1, :2].copy_(clone[0:8].view(torch.float32))


def a_parameter_stands_for_a_transposed_source(loaded: Tensors, params: Tensors) -> None:
    square = torch.zeros(4, 4)
    square.copy_(loaded["w"][:4].t())
    params["p"].view(-1)[:16].copy_((square * 2).view(-1))
    params["q"][0, 0] = float(square.clone().is_contiguous())


def an_overlapping_view_is_filled(loaded: Tensors, params: Tensors) -> None:
    loaded["w"].as_strided((8, 4), (3, 1)).fill_(5)
    params["p"].copy_(loaded["w"])


def numpy_of_a_parameter_taken_before(loaded: Tensors, params: Tensors) -> None:
    seen = params["p"].numpy()
    params["p"].copy_(loaded["w"])
    params["q"].copy_(torch.from_numpy(seen.copy()))


def the_default_dtype_changes(loaded: Tensors, params: Tensors) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        quotient = loaded["i"] / 3
    finally:
        torch.set_default_dtype(before)
    params["p"].copy_(quotient - quotient.float())


def sums_depend_on_the_layout(loaded: Tensors, params: Tensors) -> None:
    params["p"][:, 0].copy_(loaded["big"][:, 3:500].sum(1)[:8])
    params["p"][:, 1].copy_(loaded["big"].t().sum(1)[:8])
    params["q"][0, 0].copy_(loaded["big"][::2, ::3].norm())


def conjugates(loaded: Tensors, params: Tensors) -> None:
    value = loaded["c"].conj()
    params["p"].copy_(value.imag)
    params["z"].conj().copy_(loaded["c"])
    params["z"].imag.neg().copy_(loaded["u"])


CASES: tuple[Callable[[Tensors, Tensors], None], ...] = (
    numpy_of_a_loaded_tensor,
    view_of_a_read_tensor,
    a_parameter_takes_over_and_changes,
    a_parameter_gets_other_memory,
    two_parameters_are_swapped,
    a_clone_is_changed_and_so_is_its_source,
    a_copy_is_made_of_a_parameter,
    copies_share_what_the_originals_share,
    a_part_of_an_odd_tensor_is_cast,
    a_parameter_stands_for_a_transposed_source,
    an_overlapping_view_is_filled,
    numpy_of_a_parameter_taken_before,
    the_default_dtype_changes,
    sums_depend_on_the_layout,
    conjugates,
)


@pytest.mark.parametrize("lead_bytes", [64, 77])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.__name__))
def test_as_with_real_tensors(case: Callable[[Tensors, Tensors], None], lead_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": arange(8, 4),
        "u": arange(8, 4, start=100),
        "odd": torch.arange(9, dtype=torch.uint8),
        "i": arange(8, 4, dtype=torch.int32),
        "c": torch.complex(arange(8, 4), arange(8, 4, start=50)),
        "big": torch.randn(333, 517, generator=generator),
    }
    if case is not conjugates:
        del tensors["c"]
    params = {"p": zeros(8, 4), "q": zeros(8, 4), "z": torch.zeros(8, 4, dtype=torch.complex64)}
    check(tensors, params, case, lead_bytes=lead_bytes)


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t_(),
        lambda w: w.unsqueeze_(0),
        lambda w: w.resize_(2, 2),
        lambda w: w.set_(torch.zeros(3)),
        lambda w: setattr(w, "data", torch.zeros(8, 4)),
    ],
)
def test_another_shape_or_memory_in_place_is_refused(
    change: Callable[[torch.Tensor], object], read_before: bool
) -> None:
    """The session then reads eagerly."""

    def body(loaded: Tensors) -> None:
        if read_before:
            loaded["w"].sum().item()
        change(loaded["w"])

    with pytest.raises(TraceError):
        MemoryCheckpoint({"w": arange(8, 4)}).run(body)


def test_tensors_whose_address_was_taken_are_given_up() -> None:
    """A loader that looks at all values, one tensor after the other, holds one at a time."""
    seen: list[Any] = []
    weak: Any = StorageWeakRef
    most = 0

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        nonlocal most
        total = 0.0
        while loaded:
            _, tensor = loaded.popitem()
            total += float(tensor.numpy().sum()) + float(sum(tensor.tolist()))
            if isinstance(tensor, LazyTensor):
                assert tensor.node.real is not None
                seen.append(weak(tensor.node.real.untyped_storage()))
                most = max(most, sum(not memory.expired() for memory in seen))
        params["sum"].fill_(total)

    check({str(k): arange(8, start=k) for k in range(5)}, {"sum": zeros(1)}, body)
    assert len(seen) == 5
    # The one in hand, and the last one.
    assert most <= 2
