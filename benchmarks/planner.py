"""How long it takes to know who reads what, and how many bytes and requests that makes.

    python -m benchmarks.planner [--quick] [--json]

1. *agreement*: 100,000 tensors of a mixture of experts at tensor parallel size 8: what one rank
   does between the start of the trace and its first request. The 8 ranks are traced one after the
   other and the slowest counts; on a node they run at the same time, each on a CPU of its own.
   CPU seconds of one thread, which never waits. What is not in it: the messages' way through a
   socket (their bytes are printed). Bar: 8 s.
2. *ranks*: the planner alone, each rank in a process: bytes of the node / bytes of the model, at 4
   and 8 ranks. Bar: 1.01.
3. *boxes*: the same boxes planned for each rank alone, for the node, and by the planner of orbax
   v1's safetensors layout: bytes, requests, CPU seconds of the slowest rank. A tenth of the
   models' layers; chunks of 8 MiB for all (orbax's default of 128 MiB makes fewer requests of the
   same bytes).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.planner_boxes import MODELS, Model
from benchmarks.planner_orbax import OrbaxPlanner
from benchmarks.planner_ranks import CHUNK_BYTES, GAP_BYTES, divide, own_chunks
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of
from benchmarks.trace import RANKS, Sizes, Traced, entries, read_of, record
from fastload_common.checkpoint.records import TensorEntry
from fastload_common.load.executor import Executor
from fastload_common.load.report import LoadReport
from fastload_common.plan.needs import Needs
from fastload_common.plan.node import plan_node
from fastload_common.plan.planner import plan_for, plan_reads
from fastload_common.plan.records import Chunk, Plan, TensorRead
from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["agreement", "boxes", "main"]

BAR_SECONDS, BAR_RATIO = 8.0, 1.01
# Few tensors take less than what happens once: first calls, a full garbage collection.
_LEAST_BAR_SECONDS = 2.0
# Of the layers of each model: its planner needs a minute for a rank of some of them.
_BOXES_SCALE = 0.1
# Experts as Qwen3 30B has them; on the meta device, so that no memory is needed.
_EXPERT = Sizes(2048, 768, "meta")


class _Planned(Exception):
    """Ends a load that has got as far as it should."""


class _Agreement:
    """Stands where a load meets the other ranks: computes what it does, and times the steps."""

    def __init__(self, objects: Sequence[ObjectId], rank: int, told: Sequence[bytes]) -> None:
        self._objects, self._rank, self._told = objects, rank, told
        self.steps: dict[str, float] = {}
        self.reads: Sequence[TensorRead] = ()
        self.chunks: list[Chunk] = []

    def agree(self, reads: Sequence[TensorRead]) -> list[Chunk]:
        self.reads = reads
        with_step = self._step
        needs = with_step("needs", lambda: Needs.of(reads, self._objects, gap_bytes=GAP_BYTES))
        message = with_step("encode", needs.encode)
        if self._told:
            assert message == self._told[self._rank]
            decoded = with_step(
                "decode", lambda: [Needs.decode(row, len(self._objects)) for row in self._told]
            )
            plan = with_step(
                "plan_node",
                lambda: plan_node(decoded, chunk_bytes=CHUNK_BYTES, gap_bytes=GAP_BYTES),
            )
            self.chunks = with_step(
                "chunks",
                lambda: [
                    Chunk(self._objects[row.object_index], ByteRange(row.start, row.end), 0)
                    for row in plan.chunks
                    if self._rank in row.consumers
                ],
            )
            self.node_requests, self.node_bytes = len(plan.chunks), plan.fetched_bytes
        return self.chunks

    def fetch(self) -> Iterator[Any]:
        return iter(())

    def _step(self, name: str, run: Any) -> Any:
        started_s = time.thread_time()
        result = run()
        self.steps[name] = time.thread_time() - started_s
        return result


def agreement(count: int) -> dict[str, Any]:
    """Trace all ranks, then plan the last one as a load does."""
    record(list(entries(2_000, _EXPERT)), _EXPERT)  # first use of torch's dispatch modes compiles
    rows = list(entries(count, _EXPERT))
    objects = list(dict.fromkeys(row.object_id for row in rows))
    told, trace_s, traced = [], [], None
    for rank in range(RANKS):
        traced = None  # one rank's records at a time
        traced = record(rows, _EXPERT, rank)
        trace_s.append(traced.cpu_s)
        reads = [read_of(transfer) for transfer in traced.transfers]
        told.append(Needs.of(reads, objects, gap_bytes=GAP_BYTES).encode())
    assert traced is not None
    return _planned(traced, objects, told, trace_s, rows)


def _planned(
    traced: Traced,
    objects: Sequence[ObjectId],
    told: Sequence[bytes],
    trace_s: Sequence[float],
    rows: Sequence[TensorEntry],
) -> dict[str, Any]:
    meeting = _Agreement(objects, RANKS - 1, told)
    executor = Executor(
        lambda chunks: iter(()),
        chunk_bytes=CHUNK_BYTES,
        merge_gap_bytes=GAP_BYTES,
        report=LoadReport("benchmark", "0", "s3://b", RANKS - 1, world_size=RANKS),
        exchange=meeting,  # type: ignore[arg-type]
    )

    def stop(plan: Plan) -> None:
        raise _Planned

    started_s = time.thread_time()
    try:
        executor.run_all(traced.transfers, stop)
    except _Planned:
        planned_s = time.thread_time() - started_s
    started_s = time.thread_time()
    plan_for(meeting.reads, meeting.chunks)
    readers_s = time.thread_time() - started_s
    steps = {"trace": max(trace_s), **meeting.steps, "plan_for": readers_s}
    steps["other"] = planned_s - sum(meeting.steps.values()) - readers_s
    return {
        "tensors": len(rows),
        "model_bytes": len(rows) * _EXPERT.tensor_bytes,
        "trace_s": list(trace_s),
        "steps_s": steps,
        "total_s": max(trace_s) + planned_s,
        "message_bytes": [len(message) for message in told],
        "node_requests": meeting.node_requests,
        "own_chunks": len(meeting.chunks),
        "node_over_model": meeting.node_bytes / (len(rows) * _EXPERT.tensor_bytes),
    }


def boxes(scale: float, ranks: int = RANKS) -> dict[str, Any]:
    """Plan the models' boxes in all ways."""
    try:
        orbax, lacking = OrbaxPlanner(), ""
    except ImportError as error:
        orbax, lacking = None, str(error)
    found: dict[str, Any] = {"models": {}, "orbax": orbax.version if orbax else lacking}
    for name, make in MODELS.items():
        model = make(scale)
        ways = {"alone": _alone(model, ranks), "node": _node(model, ranks)}
        if orbax is not None:
            rows = [orbax.plan(model.boxes(rank, ranks), CHUNK_BYTES) for rank in range(ranks)]
            ways["orbax"] = _summed(rows, model)
        found["models"][name] = ways
    return found


def _alone(model: Model, ranks: int) -> dict[str, float]:
    rows = []
    for rank in range(ranks):
        reads = model.reads(rank, ranks)
        started_s = time.thread_time()
        plan = plan_reads(reads, chunk_bytes=CHUNK_BYTES, merge_gap_bytes=GAP_BYTES)
        plan_s = time.thread_time() - started_s
        rows.append(
            {
                "bytes": plan.fetched_bytes,
                "needed": plan.needed_bytes,
                "requests": len(plan.chunks),
                "plan_s": plan_s,
            }
        )
    return _summed(rows, model)


def _node(model: Model, ranks: int) -> dict[str, float]:
    """What each rank computes; the last one is timed, its messages to and from all included."""
    objects, reads = model.objects, [model.reads(rank, ranks) for rank in range(ranks)]
    told = [Needs.of(row, objects, gap_bytes=GAP_BYTES).encode() for row in reads]
    started_s = time.thread_time()
    Needs.of(reads[-1], objects, gap_bytes=GAP_BYTES).encode()
    needs = [Needs.decode(message, len(objects)) for message in told]
    plan = plan_node(needs, chunk_bytes=CHUNK_BYTES, gap_bytes=GAP_BYTES)
    own = plan_for(reads[-1], own_chunks(model, plan, ranks - 1))
    plan_s = time.thread_time() - started_s
    assert own.needed_bytes
    return {
        "bytes_over_model": plan.fetched_bytes / model.size_bytes,
        "over_read": plan.fetched_bytes / model.size_bytes,
        "requests": len(plan.chunks),
        "plan_s": plan_s,
    }


def _summed(rows: Sequence[dict[str, float]], model: Model) -> dict[str, float]:
    total = {key: sum(row[key] for row in rows) for key in ("bytes", "needed", "requests")}
    return {
        "bytes_over_model": total["bytes"] / model.size_bytes,
        "over_read": total["bytes"] / total["needed"],
        "requests": total["requests"],
        "plan_s": max(row["plan_s"] for row in rows),
    }


def shares(scale: float) -> dict[str, Any]:
    """Let 4 and 8 processes divide each model."""
    found: dict[str, Any] = {}
    for name in MODELS:
        for ranks in (4, 8):
            row = divide(name, ranks, scale)
            found[f"{name}, {ranks} ranks"] = {
                "node_over_model": row.ratio,
                "needed_over_model": sum(row.needed_bytes) / row.model_bytes,
                "fetched_bytes": row.fetched_bytes,
                "received_bytes": row.received_bytes,
                "message_bytes": max(row.message_bytes),
                "requests": row.requests,
            }
    return found


def bars_of(found: dict[str, Any]) -> list[Bar]:
    deep = found["agreement"]
    bars = [
        Bar(
            f"seconds of trace, plan and agreement, {deep['tensors']} tensors",
            deep["total_s"],
            max(BAR_SECONDS * deep["tensors"] / 100_000, _LEAST_BAR_SECONDS),
        )
    ]
    for name, row in found["ranks"].items():
        bars.append(Bar(f"node / model, {name}", row["node_over_model"], BAR_RATIO))
    return bars


def panels_of(found: dict[str, Any]) -> list[Panel]:
    models = found["boxes"]["models"]
    ways = list(dict.fromkeys(way for row in models.values() for way in row))
    steps = found["agreement"]["steps_s"]

    def series(key: str) -> dict[str, dict[str, float]]:
        return {
            way: {name: row[way][key] for name, row in models.items() if way in row} for way in ways
        }

    return [
        Panel(f"{found['agreement']['tensors']} tensors, 8 ranks", "CPU s", {"one rank": steps}),
        Panel("Bytes of 8 ranks", "bytes / model", series("bytes_over_model")),
        Panel("Requests of 8 ranks", "requests", series("requests")),
        Panel("Planning", "CPU s of a rank", series("plan_s")),
    ]


def main() -> int:
    parser, directory = options_of(__doc__)
    options = parser.parse_args()
    scale = options.scale * (0.1 if options.quick else 1.0)
    found = {
        "agreement": agreement(max(1000, int(100_000 * scale))),
        "ranks": shares(scale),
        "boxes": boxes(_BOXES_SCALE * (0.3 if options.quick else 1.0) * options.scale),
    }
    if not options.json:
        _tell(found)
    bars = bars_of(found)
    return finish("planner", found, bars, panels_of, as_json=options.json, directory=directory)


def _tell(found: dict[str, Any]) -> None:
    deep = found["agreement"]
    steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in deep["steps_s"].items())
    print(f"{deep['tensors']} tensors: {deep['total_s']:.2f} s of CPU in one rank: {steps}")
    print(f"orbax: {found['boxes']['orbax']}")
    for name, ways in found["boxes"]["models"].items():
        print(name)
        for way, row in ways.items():
            print(
                f"  {way:14} {row['bytes_over_model']:6.3f} of the model, "
                f"{row['over_read']:6.3f} of what is needed, {row['requests']:8.0f} requests, "
                f"{row['plan_s']:.3f} s"
            )


if __name__ == "__main__":
    raise SystemExit(main())
