"""Which part of which tensor each tensor-parallel rank takes, for models of usual shapes.

Plain numbers: no engine, no torch. A box is a (start, stop) for each dimension, as engines narrow
tensors and as sharded array libraries describe shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fastload_common.plan.geometry import View, contiguous_strides
from fastload_common.plan.records import TensorRead
from fastload_common.ranges import ObjectId

__all__ = ["MODELS", "Box", "Model", "Tensor", "build"]

Bounds = tuple[tuple[int, int], ...]

_SHARD_BYTES = 5_000_000_000
# Of a real shard's header: data begins wherever it ends, at a multiple of 8 only.
_HEADER_BYTES = 23_416


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
        shape, itemsize: elements, and bytes of each.
        object_index, start: where its data begins.
        dimension: the one that is divided among the ranks; None: each takes all of it.
        heads: into how many parts at most; 0: as many as ranks.
    """

    shape: tuple[int, ...]
    itemsize: int
    object_index: int
    start: int
    dimension: int | None
    heads: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def bounds(self, rank: int, ranks: int) -> Bounds:
        """The box of one rank. With fewer heads than ranks, several ranks take the same head."""
        whole = [(0, size) for size in self.shape]
        if self.dimension is not None:
            parts = min(ranks, self.heads or ranks)
            part = self.shape[self.dimension] // parts
            first = rank * parts // ranks
            whole[self.dimension] = (first * part, (first + 1) * part)
        return tuple(whole)


@dataclass(frozen=True, slots=True)
class Box:
    """What one rank takes of one tensor."""

    tensor: Tensor
    bounds: Bounds

    def read(self, objects: Sequence[ObjectId]) -> TensorRead:
        """The same as the trace records it."""
        tensor = self.tensor
        strides = contiguous_strides(tensor.shape)
        offset = sum(low * stride for (low, _), stride in zip(self.bounds, strides, strict=True))
        sizes = tuple(high - low for low, high in self.bounds)
        view = View(sizes, strides, offset)
        return TensorRead(objects[tensor.object_index], tensor.start, tensor.itemsize, view)


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint: its tensors in the order in which they lie."""

    name: str
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def objects(self) -> list[ObjectId]:
        count = self.tensors[-1].object_index + 1
        return [
            ObjectId(f"s3://b/model-{k:05}.safetensors", '"1"', 2 * _SHARD_BYTES)
            for k in range(count)
        ]

    def boxes(self, rank: int, ranks: int) -> list[Box]:
        return [Box(tensor, tensor.bounds(rank, ranks)) for tensor in self.tensors]

    def reads(self, rank: int, ranks: int) -> list[TensorRead]:
        objects = self.objects
        return [box.read(objects) for box in self.boxes(rank, ranks)]


# One weight: shape, bytes of an element, dimension, heads; as in `Tensor`.
_Row = tuple[tuple[int, ...], int, int | None, int]


def build(name: str, rows: Iterator[_Row]) -> Model:
    """Lay weights one behind the other into shards of 5 GB."""
    tensors, index, start = [], 0, _HEADER_BYTES
    for shape, itemsize, dimension, heads in rows:
        tensor = Tensor(shape, itemsize, index, start, dimension, heads)
        if start + tensor.size_bytes > _SHARD_BYTES and start > _HEADER_BYTES:
            index, start = index + 1, _HEADER_BYTES
            tensor = Tensor(shape, itemsize, index, start, dimension, heads)
        tensors.append(tensor)
        start += tensor.size_bytes
    return Model(name, tuple(tensors))


def _attention(hidden: int, kv_heads: int, width: int = 2) -> Iterator[_Row]:
    kv = 128 * kv_heads
    yield (hidden,), 2, None, 0
    yield (hidden, hidden), width, 0, 0
    yield (kv, hidden), width, 0, kv_heads
    yield (kv, hidden), width, 0, kv_heads
    yield (hidden, hidden), width, 1, 0
    yield (hidden,), 2, None, 0


def _dense(layers: int, hidden: int, inner: int, kv_heads: int, vocabulary: int) -> Iterator[_Row]:
    """Column-parallel q, k, v, gate, up and vocabulary; row-parallel o and down."""
    yield (vocabulary, hidden), 2, 0, 0
    for _ in range(layers):
        yield from _attention(hidden, kv_heads)
        yield (inner, hidden), 2, 0, 0
        yield (inner, hidden), 2, 0, 0
        yield (hidden, inner), 2, 1, 0
    yield (hidden,), 2, None, 0
    yield (vocabulary, hidden), 2, 0, 0


def _experts(layers: int, hidden: int, inner: int, experts: int) -> Iterator[_Row]:
    """Two-dimensional tensors for each expert, divided within the expert."""
    yield (151_936, hidden), 2, 0, 0
    for _ in range(layers):
        yield from _attention(hidden, 4)
        yield (experts, hidden), 2, None, 0
        for _ in range(experts):
            yield (inner, hidden), 2, 0, 0
            yield (inner, hidden), 2, 0, 0
            yield (hidden, inner), 2, 1, 0


def _fused(layers: int, dimension: int) -> Iterator[_Row]:
    """Three-dimensional tensors of all experts, divided by one dimension."""
    for _ in range(layers):
        yield from _attention(2880, 8)
        yield (32, 5760, 2880), 2, dimension, 0
        yield (32, 2880, 2880), 2, dimension, 0


def _mla(layers: int, hidden: int, inner: int) -> Iterator[_Row]:
    """Latent attention: the projections to the latent space are whole on each rank."""
    heads = 128
    yield (129_280, hidden), 2, 0, 0
    for _ in range(layers):
        yield (hidden,), 2, None, 0
        yield (1536, hidden), 2, None, 0
        yield (1536,), 2, None, 0
        yield (heads * 192, 1536), 2, 0, 0
        yield (576, hidden), 2, None, 0
        yield (512,), 2, None, 0
        yield (heads * 256, 512), 2, 0, 0
        yield (hidden, heads * 128), 2, 1, 0
        yield (inner, hidden), 2, 0, 0
        yield (inner, hidden), 2, 0, 0
        yield (hidden, inner), 2, 1, 0


def _blocks(layers: int, hidden: int, inner: int) -> Iterator[_Row]:
    """fp8 with a float32 scale for each block of 128 x 128."""
    yield (151_936, hidden), 2, 0, 0
    for _ in range(layers):
        yield from _attention(hidden, 8, width=1)
        for shape, dimension in (((inner, hidden), 0), ((inner, hidden), 0), ((hidden, inner), 1)):
            yield shape, 1, dimension, 0
            yield tuple(size // 128 for size in shape), 4, dimension, 0


MODELS: dict[str, Callable[[float], Model]] = {
    "dense (Llama-3 8B)": lambda scale: build(
        "dense", _dense(_some(32, scale), 4096, 14_336, 8, 128_256)
    ),
    "GQA, 2 KV heads": lambda scale: build(
        "gqa", _dense(_some(28, scale), 3584, 18_432, 2, 151_936)
    ),
    "MoE, a tensor for each expert": lambda scale: build(
        "moe", _experts(_some(48, scale), 2048, 768, 128)
    ),
    "MoE, fused, by expert (dim 0)": lambda scale: build("fused0", _fused(_some(24, scale), 0)),
    "MoE, fused, by rows (dim 1)": lambda scale: build("fused1", _fused(_some(24, scale), 1)),
    "MoE, fused, by columns (dim 2)": lambda scale: build("fused2", _fused(_some(24, scale), 2)),
    "MLA": lambda scale: build("mla", _mla(_some(16, scale), 7168, 18_432)),
    "fp8, blocks": lambda scale: build("fp8", _blocks(_some(36, scale), 4096, 12_288)),
}
"""Name -> the model, with so many of its layers."""


def _some(layers: int, scale: float) -> int:
    return max(1, round(layers * scale))
