"""The rules of the trace, each against what real tensors do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastload_common.errors import TensorMismatchError, TraceError
from tests.common.trace.harness import MemoryCheckpoint, arange, check, zeros


def test_only_the_slice_is_read() -> None:
    done = check(
        {"w": arange(64, 64)},
        {"p": zeros(16, 64)},
        lambda loaded, params: params["p"].copy_(loaded["w"].narrow(0, 16, 16)),
        chunk_bytes=1 << 20,
    )
    assert [span.size_bytes for span in done.requests] == [16 * 64 * 4]
    assert done.plan.needed_bytes == 16 * 64 * 4


def test_slices_of_a_reordered_copy_are_read_as_slices() -> None:
    """Bloom's fused QKV: view, transpose, reshape, then narrow to one rank's heads."""
    done = check(
        {"w": arange(8 * 3 * 4, 16)},
        {"p": zeros(4 * 3 * 4 // 3, 16)},
        lambda loaded, params: params["p"].copy_(
            loaded["w"].view(8, 3, 4, 16).transpose(0, 1).reshape(96, 16)[32 + 16 : 32 + 32]
        ),
        chunk_bytes=1 << 20,
    )
    assert done.plan.needed_bytes == 16 * 16 * 4


def test_of_rows_that_are_picked_by_number_only_those_are_read() -> None:
    """Llama 4 takes a rank's experts of a fused tensor so."""

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        mine = (torch.tensor([-1, -1, 0, 1]) != -1).nonzero().flatten()
        halves = loaded["w"].transpose(-1, -2).chunk(2, dim=-2)
        params["p"].copy_(halves[1][mine])
        loaded["w"].zero_()

    done = check({"w": arange(4, 6, 8)}, {"p": zeros(2, 4, 6)}, body, chunk_bytes=1 << 20)
    assert done.requests_while_tracing == 0
    assert done.plan.needed_bytes == 2 * 4 * 6 * 4


def test_nothing_is_read_while_tracing() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"][:4].copy_(loaded["w"].narrow(0, 0, 4))
        params["p"][4:].copy_(loaded["w"].t().contiguous().t()[4:])
        params["q"].copy_(torch.cat([loaded["w"], loaded["w"]], 1).to(torch.float64))

    done = check({"w": arange(8, 6)}, {"p": zeros(8, 6), "q": zeros(8, 12).double()}, body)
    assert done.requests_while_tracing == 0


def test_reading_a_parameter_that_is_to_be_filled_reads_nothing_yet() -> None:
    """Mamba2 computes -exp(A) right after copying A."""

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["a"].copy_(loaded["a"])
        params["a"].copy_(-torch.exp(params["a"].float()))
        params["b"].copy_(loaded["b"])  # a cast
        params["c"].copy_(params["b"] + params["a"].sum())

    done = check(
        {"a": arange(8) / 8, "b": arange(64)},
        {"a": zeros(8), "b": zeros(64).bfloat16(), "c": zeros(64)},
        body,
    )
    assert done.requests_while_tracing == 0
    assert done.recorder.ledger.settled_count == 0  # type: ignore[attr-defined]


def test_reading_a_part_of_what_is_to_be_filled_settles_it() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["a"].copy_(loaded["a"])
        params["b"].copy_(loaded["b"])
        params["c"].copy_(loaded["c"] * params["a"][2:6])  # beside a lazy tensor
        params["a"].copy_(-torch.exp(params["a"][1:].sum() + params["a"]))

    done = check(
        {"a": arange(8) / 8, "b": arange(64), "c": arange(4)},
        {"a": zeros(8), "b": zeros(64), "c": zeros(4)},
        body,
    )
    assert done.recorder.ledger.settled_count == 1  # type: ignore[attr-defined]


def test_a_copy_that_is_overwritten_is_not_read() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"].copy_(loaded["a"])
        params["p"].copy_(loaded["b"])

    done = check({"a": arange(64), "b": arange(64, start=9)}, {"p": zeros(64)}, body)
    assert sum(span.size_bytes for span in done.requests) == 64 * 4


def test_a_buffer_like_a_loaded_tensor_is_filled_in_pieces() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        buffer = torch.empty_like(loaded["w"])
        buffer[:4] = loaded["w"][4:]
        buffer[4:] = loaded["w"][:4]
        params["p"].copy_(buffer)

    check({"w": arange(8, 4)}, {"p": zeros(8, 4)}, body)


def test_overwriting_a_loaded_tensor_with_a_part_of_itself() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        loaded["w"].copy_(loaded["w"].t().clone())
        loaded["v"].copy_(loaded["v"].t())
        loaded["u"].fill_(loaded["u"][1, 2])
        params["p"].copy_(loaded["w"])
        params["q"].copy_(loaded["u"])

    check(
        {"w": arange(4, 4), "v": arange(1, 1), "u": arange(4, 4)},
        {"p": zeros(4, 4), "q": zeros(4, 4)},
        body,
    )


def test_random_numbers_come_in_their_order() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(3)
        params["p"].copy_(torch.bernoulli(loaded["w"] / 64))
        params["q"].copy_(torch.rand(8))

    check({"w": arange(8, 4)}, {"p": zeros(8, 4), "q": zeros(8)}, body)


def test_in_place_on_a_loaded_tensor_is_seen_by_later_copies_only() -> None:
    """gpt-oss zeroes a loaded bias on ranks other than 0."""

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["before"].copy_(loaded["w"][2:4])
        clone = loaded["w"].clone()
        tripled = loaded["w"] * 3
        loaded["w"][1:6].zero_()
        params["after"].copy_(loaded["w"][:4])
        params["clone"].copy_(clone)
        params["tripled"].copy_(tripled)
        clone.add_(1)
        params["later_clone"].copy_(clone)

    check(
        {"w": arange(8, 4)},
        {
            "before": zeros(2, 4),
            "after": zeros(4, 4),
            "clone": zeros(8, 4),
            "tripled": zeros(8, 4),
            "later_clone": zeros(8, 4),
        },
        body,
    )


def test_zeroing_a_whole_tensor_reads_nothing() -> None:
    done = check(
        {"w": arange(8, 4)},
        {"p": zeros(8, 4)},
        lambda loaded, params: params["p"].copy_(loaded["w"].zero_()),
    )
    assert done.requests == []


def test_in_place_returns_the_tensor_that_was_passed() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        view = loaded["w"][2:]
        assert view.mul_(2) is view
        params["p"].copy_(loaded["w"])

    check({"w": arange(8, 4)}, {"p": zeros(8, 4)}, body)


def test_overlapping_copies_keep_their_order() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"].copy_(loaded["a"])
        params["p"][2:4, 1:3].copy_(loaded["b"])
        params["p"].t()[1].copy_(loaded["c"])

    check(
        {"a": arange(8, 4), "b": arange(2, 2, start=100), "c": arange(8, start=200)},
        {"p": zeros(8, 4)},
        body,
    )


@pytest.mark.parametrize(
    "fill", [lambda p: p[6:].fill_(0), lambda p: p[:, 3:].zero_(), lambda p: p[5].copy_(p[7])]
)
def test_padding_beside_a_pending_copy_settles_nothing(
    fill: Callable[[torch.Tensor], object],
) -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"][:5, :3].copy_(loaded["w"])
        fill(params["p"])

    done = check({"w": arange(5, 3)}, {"p": zeros(8, 4)}, body)
    assert done.recorder.ledger.settled_count == 0  # type: ignore[attr-defined]


def test_writing_over_a_pending_copy_comes_after_it() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"].copy_(loaded["w"])
        params["p"][2:4].fill_(5)
        params["q"].copy_(loaded["w"])
        params["q"].data_ptr()

    check({"w": arange(8, 4)}, {"p": zeros(8, 4), "q": zeros(8, 4)}, body)


def test_taking_the_address_of_a_parameter_settles_it() -> None:
    seen = []

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"].copy_(loaded["w"])
        seen.append(params["p"].numpy().sum())

    check({"w": arange(8, 4)}, {"p": zeros(8, 4)}, body)
    assert seen[0] == seen[1]


def test_a_value_is_read_at_once_and_only_its_bytes() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        if loaded["flag"].item() == 1.0 and bool(loaded["flag"] > 0):
            params["p"].fill_(float(loaded["scale"]))

    done = check(
        {"flag": arange(1), "w": arange(512, 600), "scale": torch.tensor(2.5)},
        {"p": zeros(4)},
        body,
    )
    assert sum(span.size_bytes for span in done.requests) < 512


def test_a_parameter_can_take_over_a_loaded_tensor() -> None:
    param = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=False)

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        param.data = loaded["w"]
        params["p"].copy_(param)

    check({"w": arange(8, 4)}, {"p": zeros(8, 4)}, body)
    assert type(param) is torch.nn.Parameter
    assert torch.equal(param, arange(8, 4))


def test_a_real_tensor_in_an_expression_counts_with_its_value_at_that_time() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        small, large = torch.ones(4), torch.ones(20_000)
        first = loaded["w"] * small
        second = loaded["l"] * large
        small.fill_(9)
        large.fill_(9)
        params["p"].copy_(first)
        params["q"].copy_(second)

    check({"w": arange(8, 4), "l": arange(20_000)}, {"p": zeros(8, 4), "q": zeros(20_000)}, body)


def test_foreach_copy() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["r"].copy_(loaded["a"])
        torch._foreach_copy_(
            [params["p"], params["q"], params["r"][2:4]],
            [loaded["a"], loaded["b"], torch.ones(2)],
        )
        torch._foreach_copy_([loaded["b"]], [torch.ones(4)])
        params["s"].copy_(loaded["b"])

    check(
        {"a": arange(8), "b": arange(4)},
        {"p": zeros(8), "q": zeros(4), "r": zeros(8), "s": zeros(4)},
        body,
    )


def test_copies_in_other_threads_are_done_at_once() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        def row(k: int) -> None:
            params["p"][k].copy_(loaded["w"].narrow(0, k, 1)[0] * 2)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(row, range(8)))

    done = check({"w": arange(8, 4)}, {"p": zeros(8, 4)}, body)
    assert done.requests_while_tracing == len(done.requests) > 0


def test_a_shape_that_does_not_fit_names_both() -> None:
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    with pytest.raises(TensorMismatchError, match=r"'w': shape \[8, 4\].*shape \[8, 5\]"):
        checkpoint.run(lambda loaded: torch.zeros(8, 5).copy_(loaded["w"]))
    assert checkpoint.requests == []


@pytest.mark.parametrize(
    ("operation", "as_torch"),
    [
        (lambda w: w.narrow(0, 6, 4), RuntimeError),
        (lambda w: w[2:].narrow(1, 0, 5), RuntimeError),
        (lambda w: w.view(3, 11), RuntimeError),
        (lambda w: w.select(0, 9), IndexError),
        (lambda w: w.transpose(0, 2), IndexError),
        (lambda w: w.narrow(3, 0, 1), IndexError),
        (lambda w: w.as_strided((9, 9), (9, 1)), RuntimeError),
    ],
)
def test_a_view_that_cannot_be_names_the_tensor(
    operation: Callable[[torch.Tensor], object], as_torch: type[Exception]
) -> None:
    with pytest.raises(as_torch):
        operation(arange(8, 4))
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    for kind in (as_torch, TensorMismatchError):
        with pytest.raises(kind, match="tensor 'w': "):
            checkpoint.run(lambda loaded: operation(loaded["w"]))
    assert checkpoint.requests == []


def test_a_tensor_kept_beyond_the_load_says_so() -> None:
    kept = {}
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    checkpoint.run(lambda loaded: kept.update(loaded))
    with pytest.raises(TraceError, match="after its load"):
        kept["w"] + 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_in_each_mode_of_autograd(mode: Callable[[], object]) -> None:
    param = torch.nn.Parameter(torch.zeros(8, 4), requires_grad=mode is torch.no_grad)

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"].copy_(loaded["w"].t().contiguous().t())
        params["q"].copy_(loaded["w"][2:4] * 2)
        param.data.copy_(loaded["w"])
        params["r"].copy_(params["p"] + 1)

    with mode():  # type: ignore[attr-defined]
        check({"w": arange(8, 4)}, {"p": zeros(8, 4), "q": zeros(2, 4), "r": zeros(8, 4)}, body)
    assert torch.equal(param, arange(8, 4))


def test_a_default_device_changes_nothing() -> None:
    with torch.device("meta"):
        checkpoint_of = {"w": torch.ones(4, 4, device="cpu")}
        param = torch.zeros(4, 2, device="cpu")
        MemoryCheckpoint(checkpoint_of, lead_bytes=77).run(
            lambda loaded: param.copy_(loaded["w"].double()[:, 1:3] * loaded["w"][0, 0].item())
        )
    assert torch.equal(param, torch.ones(4, 2))


def test_meta_destinations_need_no_bytes() -> None:
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    checkpoint.run(lambda loaded: torch.empty(8, 4, device="meta").copy_(loaded["w"]))
    assert checkpoint.requests == []


def test_repr_reads_nothing() -> None:
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    checkpoint.run(lambda loaded: repr(loaded["w"]) + str(loaded["w"].shape))
    assert checkpoint.requests == []
