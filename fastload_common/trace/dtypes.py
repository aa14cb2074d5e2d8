"""safetensors dtype strings as torch dtypes, as the reference binding maps them."""

from __future__ import annotations

from functools import cache

import torch

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.errors import TensorMismatchError

__all__ = ["torch_layout"]


@cache
def _dtypes() -> dict[str, torch.dtype]:
    names = {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "F4": "float4_e2m1fn_x2",
    }
    return {name: getattr(torch, attr) for name, attr in names.items() if hasattr(torch, attr)}


def torch_layout(entry: TensorEntry) -> tuple[torch.dtype, tuple[int, ...]]:
    """The torch dtype and shape of a tensor in a checkpoint.

    F4 holds two elements in a byte; torch sees half as many in the last dimension.

    Raises:
        TensorMismatchError: this torch has no such dtype.
    """
    dtype = _dtypes().get(entry.dtype)
    if dtype is None:
        raise TensorMismatchError(
            f"tensor {entry.name!r} has dtype {entry.dtype}, which torch {torch.__version__} lacks",
            hint="convert the checkpoint or use a newer torch",
            object=entry.object_id.uri,
            range=str(entry.byte_range),
        )
    if entry.dtype == "F4":
        if not entry.shape or entry.shape[-1] % 2:
            raise TensorMismatchError(
                f"tensor {entry.name!r} holds an odd count of 4-bit elements in its last dimension",
                hint="pack the last dimension to an even size",
                object=entry.object_id.uri,
                shape=entry.shape,
            )
        return dtype, (*entry.shape[:-1], entry.shape[-1] // 2)
    return dtype, entry.shape
