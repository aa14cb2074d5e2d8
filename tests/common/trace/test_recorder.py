"""The rules of the trace, each against what real tensors do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastload_common.errors import TensorMismatchError, TraceError
from fastload_common.trace.lazy_tensor import LazyTensor
from tests.common.trace.harness import MemoryCheckpoint

Body = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], object]


def arange(*sizes: int, dtype: torch.dtype = torch.float32, start: int = 1) -> torch.Tensor:
    count = 1
    for size in sizes:
        count *= size
    return torch.arange(start, start + count, dtype=torch.float32).to(dtype).reshape(sizes)


def check(
    tensors: dict[str, torch.Tensor],
    params: dict[str, torch.Tensor],
    body: Body,
    **options: object,
) -> MemoryCheckpoint:
    """Run `body(loaded, params)` over real and over lazy tensors; parameters must be equal."""
    expected = {name: param.clone() for name, param in params.items()}
    body({name: tensor.clone() for name, tensor in tensors.items()}, expected)
    checkpoint = MemoryCheckpoint(tensors, **options)  # type: ignore[arg-type]
    actual = {name: param.clone() for name, param in params.items()}
    checkpoint.recorder = checkpoint.run(lambda loaded: body(loaded, actual))  # type: ignore[attr-defined]
    for name in params:
        assert not isinstance(actual[name], LazyTensor)
        assert torch.equal(
            actual[name].contiguous().view(-1).view(torch.uint8),
            expected[name].contiguous().view(-1).view(torch.uint8),
        ), name
    return checkpoint


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, -7.0).to(dtype)


COPIES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": ((8, 24), lambda w: w),
    "rows": ((4, 24), lambda w: w.narrow(0, 2, 4)),
    "rows_negative_dim": ((4, 24), lambda w: w.narrow(-2, 2, 4)),
    "columns": ((8, 6), lambda w: w.narrow(1, 6, 6)),
    "slices": ((3, 5), lambda w: w[1:7:2, 3:18:3]),
    "ellipsis": ((8, 2), lambda w: w[..., -2:]),
    "select": ((24,), lambda w: w[3]),
    "scalar_element": ((), lambda w: w[3, 4]),
    "transpose": ((24, 8), lambda w: w.t()),
    "transpose_rows": ((6, 8), lambda w: w.T[6:12]),
    "permute": ((24, 1, 8), lambda w: w.unsqueeze(1).permute(2, 1, 0)),
    "view": ((4, 2, 24), lambda w: w.view(4, 2, 24)),
    "view_minus_one": ((192,), lambda w: w.view(-1)),
    "flatten_narrow": ((10,), lambda w: w.flatten().narrow(0, 30, 10)),
    "reshape_copy": ((24, 4), lambda w: w.view(8, 3, 8).transpose(0, 1).reshape(24, 8)[:, :4]),
    "reshape_whole_heads": ((8, 8), lambda w: w.view(8, 3, 8).transpose(0, 1).reshape(24, 8)[8:16]),
    "reshape_half_head": ((5, 8), lambda w: w.view(8, 3, 8).transpose(0, 1).reshape(24, 8)[6:11]),
    "chunk": ((8, 6), lambda w: w.chunk(4, dim=1)[2]),
    "split": ((8, 5), lambda w: torch.split(w, [10, 5, 9], dim=1)[1]),
    "unbind": ((24,), lambda w: w.unbind(0)[5]),
    "unflatten": ((8, 4, 6), lambda w: torch.unflatten(w, 1, (4, 6))),
    "movedim": ((24, 8), lambda w: w.movedim(0, 1)),
    "diagonal": ((8,), lambda w: w.diagonal()),
    "unfold": ((8, 11, 4), lambda w: w.unfold(1, 4, 2)),
    "expand": ((2, 8, 24), lambda w: w.expand(2, 8, 24)),
    "broadcast_into": ((3, 8, 24), lambda w: w),
    "broadcast_row": ((5, 24), lambda w: w[2]),
    "leading_ones": ((1, 1, 24), lambda w: w[None, 2:3]),
    "clone": ((8, 24), lambda w: w.clone()),
    "contiguous_columns": ((24, 4), lambda w: w.t().contiguous()[:, 2:6]),
    "double_contiguous": ((4, 12), lambda w: w.t().contiguous().t().contiguous()[2:6, 3:15]),
    "cat": ((16, 4), lambda w: torch.cat([w, w], 0)[:, :4]),
    "stack": ((2, 8, 24), lambda w: torch.stack([w, w * 2])),
    "arithmetic": ((8, 24), lambda w: -w.exp() + 1),
    "sum": ((8,), lambda w: w.sum(1)),
    "max_values": ((8,), lambda w: w.max(dim=1).values),
    "cast": ((4, 24), lambda w: w.to(torch.float64)[2:6]),
    "two_casts": ((4, 24), lambda w: w.to(torch.bfloat16).to(torch.float64)[2:6]),
    "bit_cast": ((8, 96), lambda w: w.view(torch.uint8)),
    "bit_cast_columns": ((8, 8), lambda w: w.view(torch.uint8)[:, 8:16]),
    "index_select": ((3, 24), lambda w: w[torch.tensor([5, 0, 5])]),
    "mask": ((96,), lambda w: w[w > w.mean()]),
    "repeat": ((16, 24), lambda w: w.repeat(2, 1)),
    "repeat_interleave": ((16, 24), lambda w: w.repeat_interleave(2, 0)),
    "as_strided": ((4, 4), lambda w: w.as_strided((4, 4), (24, 2), 5)),
    "numpy": ((8, 24), lambda w: torch.from_numpy(w.numpy())),
    "tolist": ((8, 24), lambda w: torch.tensor(w.tolist())),
    "deepcopy": ((8, 24), lambda w: __import__("copy").deepcopy(w)),
    "data": ((4, 24), lambda w: w.data[2:6]),
    "roll": ((8, 24), lambda w: w.roll(1, 0)),
    "empty_slice": ((0, 24), lambda w: w[3:3]),
}


@pytest.mark.parametrize("lead_bytes", [64, 77], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("chunk_bytes", [64, 4096])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_of_an_operation(
    name: str, dtype: torch.dtype, chunk_bytes: int, lead_bytes: int
) -> None:
    sizes, operation = COPIES[name]
    if dtype is not torch.float32 and name in {"bit_cast", "numpy", "tolist"}:
        pytest.skip("shape or conversion is of float32")
    target = torch.uint8 if "bit_cast" in name else dtype
    check(
        {"w": arange(8, 24, dtype=dtype)},
        {"p": zeros(*sizes, dtype=target)},
        lambda loaded, params: params["p"].copy_(operation(loaded["w"])),
        chunk_bytes=chunk_bytes,
        lead_bytes=lead_bytes,
    )


@pytest.mark.parametrize("lead_bytes", [64, 77])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.int64, torch.int32),
        (torch.bool, torch.uint8),
        (torch.float8_e4m3fn, torch.float32),
    ],
)
def test_copy_casts_as_torch_does(
    source: torch.dtype, target: torch.dtype, lead_bytes: int
) -> None:
    check(
        {"w": arange(8, 24, dtype=source)},
        {"p": zeros(4, 12, dtype=target)},
        lambda loaded, params: params["p"].copy_(loaded["w"][2:6, 5:17]),
        lead_bytes=lead_bytes,
    )


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


def test_nothing_is_read_while_tracing() -> None:
    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["p"][:4].copy_(loaded["w"].narrow(0, 0, 4))
        params["p"][4:].copy_(loaded["w"].t().contiguous().t()[4:])
        params["q"].copy_(torch.cat([loaded["w"], loaded["w"]], 1).to(torch.float64))

    done = check({"w": arange(8, 6)}, {"p": zeros(8, 6), "q": zeros(8, 12).double()}, body)
    assert done.requests_while_tracing == 0


def test_reading_a_parameter_settles_what_is_pending_in_it() -> None:
    """Mamba2 computes -exp(A) right after copying A."""

    def body(loaded: dict[str, torch.Tensor], params: dict[str, torch.Tensor]) -> None:
        params["a"].copy_(loaded["a"])
        params["b"].copy_(loaded["b"])
        params["a"].copy_(-torch.exp(params["a"]))

    done = check({"a": arange(8) / 8, "b": arange(64)}, {"a": zeros(8), "b": zeros(64)}, body)
    assert done.recorder.settled_count == 1  # type: ignore[attr-defined]


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
    assert done.recorder.settled_count == 0  # type: ignore[attr-defined]


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
    check(
        {"a": arange(8), "b": arange(4)},
        {"p": zeros(8), "q": zeros(4)},
        lambda loaded, params: torch._foreach_copy_(
            [params["p"], params["q"]], [loaded["a"], loaded["b"]]
        ),
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


def test_meta_destinations_need_no_bytes() -> None:
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    checkpoint.run(lambda loaded: torch.empty(8, 4, device="meta").copy_(loaded["w"]))
    assert checkpoint.requests == []


def test_repr_reads_nothing() -> None:
    checkpoint = MemoryCheckpoint({"w": arange(8, 4)})
    checkpoint.run(lambda loaded: repr(loaded["w"]) + str(loaded["w"].shape))
    assert checkpoint.requests == []
