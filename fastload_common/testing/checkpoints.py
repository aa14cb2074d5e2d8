"""Write small checkpoints, ordinary and odd ones. Needs neither torch nor numpy.

An own writer of the safetensors format, so that layouts are possible which the reference library
reads but never writes: any order of entries and data, any header length, no index, a stale one.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastload_common.checkpoint.dtypes import DTYPE_BITS

__all__ = [
    "ArrayLike",
    "TensorSpec",
    "encode_file",
    "encode_header",
    "random_tensor",
    "tiny_layers",
    "write_checkpoint",
    "write_index",
]

_NUMPY_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}


class ArrayLike(Protocol):
    """A numpy array, as far as it is needed here."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as it lies in a file: safetensors dtype, logical shape, raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def random_tensor(dtype: str, shape: Sequence[int], seed: int = 0) -> TensorSpec:
    """A tensor of random bytes: the same for the same arguments."""
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} does not end at a byte")
    text = f"{dtype} {list(shape)} {seed}"
    return TensorSpec(dtype, tuple(shape), random.Random(text).randbytes(bits // 8))


def tiny_layers(count: int = 8) -> dict[str, TensorSpec]:
    """Tensors of a tiny model: per layer a matrix, a scalar, one without elements, an odd one."""
    return {
        f"model.layers.{i}.{part}": random_tensor(dtype, shape, seed=i)
        for i in range(count)
        for part, dtype, shape in (
            ("q_proj.weight", "BF16", [4, 6]),
            ("q_proj.input_scale", "F32", []),
            ("nothing", "F16", [0, 3]),
            ("odd", "U8", [3]),
        )
    }


def encode_header(
    entries: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, padding_to: int = 8
) -> bytes:
    """Length field and JSON text.

    Args:
        entries: what each name maps to; not checked.
        metadata: for ``__metadata__``.
        padding_to: spaces are added until the text is a multiple of this; 1 for none.
    """
    document = {**({"__metadata__": dict(metadata)} if metadata is not None else {}), **entries}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % padding_to)
    return struct.pack("<Q", len(text)) + text


def encode_file(
    tensors: Mapping[str, TensorSpec | ArrayLike],
    *,
    metadata: Mapping[str, str] | None = None,
    padding_to: int = 8,
    header_order: Sequence[str] | None = None,
) -> bytes:
    """One safetensors file; the data lies in the order of ``tensors``.

    Args:
        tensors: name -> tensor.
        metadata: for ``__metadata__``.
        padding_to: see `encode_header`. With 1 the data may begin anywhere.
        header_order: order of the header's entries, where it is to differ from the data's.
    """
    entries: dict[str, Any] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        spec = _spec(tensor)
        offsets = [len(data), len(data) + len(spec.data)]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        data += spec.data
    ordered = {name: entries[name] for name in header_order or entries}
    return encode_header(ordered, metadata, padding_to) + bytes(data)


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, TensorSpec | ArrayLike],
    *,
    shards: int = 1,
    index: bool = True,
    stem: str = "model",
    padding_to: int = 8,
) -> list[Path]:
    """Write a checkpoint as Hugging Face's tools name it.

    Args:
        directory: made if it is not there.
        tensors: spread over the shards in order, in runs of equal count.
        shards: 1 writes ``model.safetensors``, more write ``model-00001-of-0000n.safetensors``.
        index: whether to write ``model.safetensors.index.json`` too, if there are several shards.
        stem: first part of the names, such as ``consolidated``.
        padding_to: see `encode_header`.

    Returns:
        The weight files in order.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number in range(shards):
        own = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"{stem}-{number + 1:05}-of-{shards:05}" if shards > 1 else stem
        path = directory / f"{file}.safetensors"
        path.write_bytes(encode_file({name: tensors[name] for name in own}, padding_to=padding_to))
        paths.append(path)
        weight_map |= dict.fromkeys(own, path.name)
    if index and shards > 1:
        write_index(directory, weight_map, stem=stem)
    return paths


def write_index(directory: Path, weight_map: Mapping[str, Any], *, stem: str = "model") -> Path:
    """Write ``<stem>.safetensors.index.json``; the map is not checked."""
    path = directory / f"{stem}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}, indent=2))
    return path


def _spec(tensor: TensorSpec | ArrayLike) -> TensorSpec:
    if isinstance(tensor, TensorSpec):
        return tensor
    return TensorSpec(_NUMPY_DTYPES[str(tensor.dtype)], tuple(tensor.shape), tensor.tobytes())
