"""Models for `benchmarks.gpu`: which tensors, in which files, and what stands in them. No torch.

Layers as Megatron divides them: column-parallel weights by rows of the stored matrix (dim 0),
row-parallel ones by its columns (dim 1), norms on every rank. Contents are words that follow from
their place, so that every byte that arrived can be checked and no file need be stored.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import numpy as np

from fastload_common.units import GIB, KIB, MIB

__all__ = ["GOLDEN", "KINDS", "PERIOD_WORDS", "File", "Spec", "files_of", "pattern"]

KINDS = ("dim-0", "dim-1", "small", "mixed")
PERIOD_WORDS = 4 * MIB + 513
GOLDEN = 0x9E3779B97F4A7C15
_FILE_BYTES = 2 * GIB
_ITEM_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of the checkpoint.

    Attributes:
        dim: along which the ranks divide it; None: each has all of it.
        parameter: the one that it goes into; several tensors may share it.
        part, parts: which part of that parameter's rows it is, and of how many.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    parameter: str
    part: int = 0
    parts: int = 1

    @property
    def size_bytes(self) -> int:
        count = _ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class File:
    """One object.

    Attributes:
        header: its first bytes; what follows are words.
        starts: of each tensor, in bytes behind the header.
    """

    name: str
    header: bytes
    specs: tuple[Spec, ...]
    starts: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.starts[-1] + self.specs[-1].size_bytes


def files_of(kind: str, size_bytes: int) -> list[File]:
    """A model of about so many bytes."""
    side = 4096 if size_bytes >= GIB else 512
    specs: list[Spec] = []
    done_bytes = layer = 0
    while done_bytes < size_bytes:
        new = _LAYERS[kind](layer, side)
        specs += new
        done_bytes += sum(spec.size_bytes for spec in new)
        layer += 1
    groups: list[list[Spec]] = [[]]
    held_bytes = 0
    for spec in specs:
        if held_bytes + spec.size_bytes > _FILE_BYTES:
            groups.append([])
            held_bytes = 0
        groups[-1].append(spec)
        held_bytes += spec.size_bytes
    return [
        _file(f"model-{number:05}-of-{len(groups):05}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def pattern() -> bytes:
    """The words that repeat behind every header."""
    return (np.arange(PERIOD_WORDS, dtype=np.uint64) * np.uint64(GOLDEN)).tobytes()


def _file(name: str, specs: list[Spec]) -> File:
    table, starts, at = {}, [], 0
    for spec in specs:
        starts.append(at)
        table[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.size_bytes],
        }
        at += spec.size_bytes
    text = json.dumps(table).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return File(name, struct.pack("<Q", len(text)) + text, tuple(specs), tuple(starts))


def _columns(layer: int, side: int) -> list[Spec]:
    name = f"layers.{layer}.up.weight"
    return [Spec(name, "BF16", (side, side), 0, name)]


def _rows(layer: int, side: int) -> list[Spec]:
    name = f"layers.{layer}.down.weight"
    return [Spec(name, "BF16", (side, side), 1, name)]


def _small(layer: int, side: int) -> list[Spec]:
    """128 tensors of 4 to 256 KiB, on average 128 KiB: scales, norms, biases, small experts."""
    found = []
    for number in range(128):
        name = f"layers.{layer}.scales.{number}"
        count = 2 * KIB + (number * 61 % 127) * KIB
        found.append(Spec(name, "BF16", (count,), None, name))
    return found


def _mixed(layer: int, side: int) -> list[Spec]:
    """A layer of a dense transformer, with what is fused in the parameter and not in the file."""
    start = f"layers.{layer}."
    qkv, gate_up = start + "qkv.weight", start + "gate_up.weight"
    own = {
        name: start + name for name in ("o.weight", "down.weight", "norm.weight", "router.weight")
    }
    return [
        *(
            Spec(start + f"{n}.weight", "BF16", (side, side), 0, qkv, k, 3)
            for k, n in enumerate("qkv")
        ),
        Spec(own["o.weight"], "BF16", (side, side), 1, own["o.weight"]),
        *(
            Spec(start + f"{n}.weight", "BF16", (3 * side, side), 0, gate_up, k, 2)
            for k, n in enumerate(("gate", "up"))
        ),
        Spec(own["down.weight"], "BF16", (side, 3 * side), 1, own["down.weight"]),
        Spec(own["norm.weight"], "BF16", (side,), None, own["norm.weight"]),
        # Stored wider than it is used: a cast on the way.
        Spec(own["router.weight"], "F32", (64, side), None, own["router.weight"]),
    ]


_LAYERS = {"dim-0": _columns, "dim-1": _rows, "small": _small, "mixed": _mixed}
