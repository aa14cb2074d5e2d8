"""The dtypes of the safetensors format: name and width. Knows nothing of torch.

A test compares the table with the installed reference reader, so a dtype that a new release adds
fails there first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["DTYPE_BITS"]

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2": 8,
        "F8_E5M2FNUZ": 8,
        "F8_E8M0": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "I64": 64,
        "U64": 64,
        "F64": 64,
        "C64": 64,
    }
)
"""Bits of one element. ``C64`` is a pair of F32."""
