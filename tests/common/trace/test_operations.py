"""One copy of the result of each operation, against what real tensors give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from tests.common.trace.harness import arange, check, zeros

COPIES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": ((8, 24), lambda w: w),
    "rows": ((4, 24), lambda w: w.narrow(0, 2, 4)),
    "rows_negative_dim": ((4, 24), lambda w: w.narrow(-2, 2, 4)),
    "columns": ((8, 6), lambda w: w.narrow(1, 6, 6)),
    "slices": ((3, 5), lambda w: w[1:7:2, 3:18:3]),
    "ellipsis": ((8, 2), lambda w: w[..., -2:]),
    "select": ((24,), lambda w: w[3]),
    "scalar_element": ((), lambda w: w[3, 4]),
    "pick_rows": ((3, 24), lambda w: w[torch.tensor([4, 5, 6])]),
    "pick_every_second_row": ((3, 24), lambda w: w[torch.tensor([1, 3, 5])]),
    "pick_one_row": ((1, 24), lambda w: w[[7]]),
    "pick_rows_out_of_order": ((3, 24), lambda w: w[torch.tensor([4, 2, 6])]),
    "pick_rows_again": ((3, 24), lambda w: w[torch.tensor([4, 4, 4])]),
    "pick_rows_from_the_end": ((2, 24), lambda w: w[torch.tensor([-2, -1])]),
    "pick_columns_of_transposed": ((24, 2), lambda w: w.t()[:, torch.tensor([2, 3])]),
    "pick_narrow": ((2, 6), lambda w: w[torch.tensor([2, 3, 4])].narrow(1, 6, 6)[1:]),
    "index_select_following": ((8, 3), lambda w: w.index_select(-1, torch.tensor([5, 6, 7]))),
    "pick_by_mask": ((2, 24), lambda w: w[torch.arange(8) > 5]),
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
    "rounded": ((8, 24), lambda w: (w / 7).to(torch.bfloat16).to(w.dtype)),
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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("chunk_bytes", "lead_bytes"),
    [(64, 64), (64, 77), (4096, 64)],
    ids=["small chunks", "unaligned", "one chunk"],
)
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_of_an_operation(
    name: str,
    dtype: torch.dtype,
    chunk_bytes: int,
    lead_bytes: int,
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    sizes, operation = COPIES[name]
    if dtype is not torch.float32 and name in {"bit_cast", "numpy", "tolist"}:
        pytest.skip("shape or conversion is of float32")
    target = torch.uint8 if "bit_cast" in name else dtype
    # In inference mode composite operations come undivided.
    with mode():
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


def test_rounding_on_the_way_is_kept() -> None:
    check(
        {"w": arange(8, 24) / 7},
        {"p": zeros(8, 24), "q": zeros(8, 24).double(), "r": zeros(8, 24)},
        lambda loaded, params: (
            params["p"].copy_(loaded["w"].to(torch.bfloat16).to(torch.float32)),
            params["q"].copy_(loaded["w"].to(torch.bfloat16)),
            params["r"].copy_(loaded["w"].int().float()),
        ),
    )
