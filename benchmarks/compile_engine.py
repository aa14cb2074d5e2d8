"""Seconds in compilation of real vLLM: a cold start, the next one, and the first on a new node.

    python -m benchmarks.compile_engine [--json] [--ranks 2]

To be run where vLLM is installed, with torch.compile on. A small random Qwen3 in a SeaweedFS
server; the compile cache is a directory of the node and a prefix of that server. A new node is an
empty disk. The rows with ``AOT`` are the engine's default; its CPU build saves such artefacts and
cannot load them. The bars: nothing is compiled again, and a start with artefacts takes less than
half of the cold one's seconds in compilation. Times are compared within one run only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.engine_start import RESULT
from benchmarks.node_engine import write_model
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of
from fastload_common.config import environment
from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.vllm_cpu import add_vllm_metadata

BAR = 0.5
BUCKET = "bench"
LIMIT_S = 600.0
SAVED = ("measured", "compiled", "loaded", "compile_s", "restore_s", "waited_s", "content_bytes")
NO_AOT = {"VLLM_USE_AOT_COMPILE": "0"}
WAYS: tuple[tuple[str, str, dict[str, str], bool], ...] = (
    ("cold", "traced", NO_AOT, False),
    ("again", "traced", NO_AOT, False),
    ("new node", "traced", NO_AOT, True),
    ("AOT, cold", "ahead", {}, True),
    ("AOT, again", "ahead", {}, False),
)
"""Row, prefix of the store, variables, whether the disk is empty."""


def start(arguments: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Start the engine, generate, and end it.

    Raises:
        RuntimeError: it failed; the text is the end of what it printed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.clients.engine_start", json.dumps(arguments)],
        env=dict(environment()) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise RuntimeError(done.stdout[-300:])
    return dict(json.loads(lines[-1].removeprefix(RESULT)))


def measure(ranks: int, layers: int) -> dict[str, Any]:
    """All rows, one after the other."""
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as name, S3Server() as server:
        root, disk = Path(name), Path(name) / "disk"
        write_model(root / "model", layers)
        server.make_bucket(BUCKET)
        server.upload_dir(root / "model", BUCKET, "model")
        names = add_vllm_metadata(root / "names")
        for way, prefix, more, is_new in WAYS:
            if is_new:
                shutil.rmtree(disk, ignore_errors=True)
            report = root / f"report-{len(rows)}"
            variables = server.environ() | more | {
                "FASTLOAD_CACHE_DIR": str(disk / "cache"),
                "FASTLOAD_COMPILE_CACHE": f"{disk / 'entries'},s3://{BUCKET}/{prefix}",
                "FASTLOAD_REPORT": str(report),
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
                "VLLM_NO_USAGE_STATS": "1",
                "PYTHONPATH": f"{names}{os.pathsep}{environment().get('PYTHONPATH', '')}",
            }  # fmt: skip
            arguments = {
                "model": f"s3://{BUCKET}/model",
                "load_format": "fastload",
                "tensor_parallel_size": ranks,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "gpu_memory_utilization": 0.3,
            }
            rows[way] = start(arguments, variables) | _said(report)
    return rows


def _said(report: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    said = next(line for line in lines if line.get("kind") == "compile_cache")
    return {name: said[name] for name in SAVED}


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = found["rows"]
    seconds = {
        name: {way: row[field] for way, row in rows.items()}
        for name, field in (("compiling", "compile_s"), ("whole start", "start_s"))
    }
    return [Panel(f"vLLM (CPU) at TP={found['ranks']}", "seconds", seconds)]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: run this with the environment of `make venv-vllm`")
        return 0
    rows = measure(options.ranks, layers=2 if options.quick else 4)
    found = {"benchmark": "compile_engine", "ranks": options.ranks, "rows": rows}
    cold = rows["cold"]
    found["tokens_equal"] = all(row["tokens"] == cold["tokens"] for row in rows.values())
    bars = []
    for way in ("again", "new node"):
        ratio = round(rows[way]["compile_s"] / cold["compile_s"], 3)
        bars += [
            Bar(f"compiled again, {way}", float(rows[way]["compiled"]), 0.0),
            Bar(f"seconds in compilation / those of the cold start, {way}", ratio, BAR),
        ]
    if not options.json:
        for way, row in rows.items():
            figures = "".join(f" {row[name]!s:>9}" for name in ("start_s", *SAVED))
            print(f"{way:12}{figures}")
        print("tokens equal:", found["tokens_equal"])
    return finish("compile_engine", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
