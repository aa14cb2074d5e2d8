"""A checkpoint in memory and everything needed to trace a function over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from fastload_common.checkpoint.records import TensorEntry
from fastload_common.load.executor import Executor
from fastload_common.load.report import LoadReport
from fastload_common.plan.planner import ALIGNMENT_BYTES
from fastload_common.plan.records import Chunk, Plan
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.trace.lazy_tensor import LazyTensor
from fastload_common.trace.recorder import Recorder
from tests.bits import bytes_of

NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass
class FilledInMemory:
    chunk: Chunk
    data: memoryview
    released: bool = False

    def release(self) -> None:
        self.released = True


@dataclass
class MemoryCheckpoint:
    """Tensors laid out in one object, the first one at `lead_bytes` (any alignment)."""

    tensors: dict[str, torch.Tensor]
    lead_bytes: int = 64
    chunk_bytes: int = ALIGNMENT_BYTES
    merge_gap_bytes: int = 0
    requests: list[ByteRange] = field(default_factory=list)
    shuffle: Callable[[list[Chunk]], None] = lambda chunks: None

    def __post_init__(self) -> None:
        body = bytearray(b"\xaa" * self.lead_bytes)
        self.entries: dict[str, TensorEntry] = {}
        places = []
        for name, tensor in self.tensors.items():
            data = bytes_of(tensor)
            places.append((name, tensor, ByteRange(len(body), len(body) + len(data))))
            body += data
        self.body = bytes(body)
        self.object_id = ObjectId("s3://test/model.safetensors", '"1"', len(body))
        for name, tensor, byte_range in places:
            self.entries[name] = TensorEntry(
                name, NAMES[tensor.dtype], tuple(tensor.shape), self.object_id, byte_range
            )

    def fetch(self, chunks: Iterable[Chunk]) -> Iterator[FilledInMemory]:
        chunks = list(chunks)
        self.shuffle(chunks)
        for chunk in chunks:
            span = chunk.byte_range
            self.requests.append(span)
            # An aligned buffer that is poisoned afterwards, as a re-used slot would be.
            slot = torch.empty(span.size_bytes, dtype=torch.uint8)
            data = memoryview(slot.numpy())  # type: ignore[arg-type]
            data[:] = self.body[span.start : span.end]
            filled = FilledInMemory(chunk, data)
            yield filled
            assert filled.released
            slot.fill_(0xFF)

    def executor(self) -> Executor:
        self.report = LoadReport("test", "0", "s3://test", 0)
        return Executor(
            self.fetch,
            chunk_bytes=self.chunk_bytes,
            merge_gap_bytes=self.merge_gap_bytes,
            report=self.report,
        )

    def run(self, consume: Callable[[dict[str, torch.Tensor]], object]) -> Recorder:
        """Trace `consume(lazy tensors by name)`, then do what was recorded."""
        executor = self.executor()
        recorder = Recorder(executor)
        with recorder.recording():
            consume({name: recorder.lazy(entry) for name, entry in self.entries.items()})
        self.requests_while_tracing = len(self.requests)
        transfers = recorder.ledger.transfers

        def on_plan(plan: Plan) -> None:
            self.plan = plan

        executor.run_all(transfers, on_plan)
        assert all(transfer.done for transfer in transfers)
        recorder.ledger.forget(transfers)
        recorder.close()
        return recorder


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
        assert bytes_of(actual[name]) == bytes_of(expected[name]), name
    return checkpoint


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(sizes, -7.0).to(dtype)
