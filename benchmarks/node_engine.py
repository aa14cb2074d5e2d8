"""Bytes that a node of real vLLM ranks takes from the store, with fastload and with Run:ai.

    python -m benchmarks.node_engine [--json] [--quick] [--only 'fastload;Run:ai']

To be run where vLLM is installed, and Run:ai's streamer (`runai-model-streamer`,
`runai-model-streamer-s3`) for its rows. Tensor parallel 2, a small random Qwen3, a SeaweedFS server
behind a proxy that counts what is sent of the weight files. The bar: fastload <= 1.01 of the model.
Times are not compared: the proxy is Python.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.engine_rank import RESULT
from benchmarks.plots import Panel
from benchmarks.results import Bar, finish, options_of
from fastload_common.config import environment
from fastload_common.testing.request_log import LoggingProxy
from fastload_common.testing.s3_server import S3Server
from fastload_common.testing.vllm_cpu import add_vllm_metadata
from fastload_common.units import GIB

BAR = 1.01
RANKS = 2
BUCKET = "bench"
LIMIT_S = 300.0
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "fastload": ("fastload", {}, {}),
    "fastload, alone": ("fastload", {}, {"FASTLOAD_EXCHANGE": "off"}),
    "Run:ai": ("runai_streamer", {}, {}),
    "Run:ai, distributed": ("runai_streamer", {"distributed": True}, {}),
}
"""Row -> load format, its extra configuration, variables."""


def write_model(directory: Path, layers: int) -> None:
    """A random Qwen3: 6 MiB a layer, in one file.

    Every process reads its own headers, 128 KiB a file: that counts, so files must not be tiny.
    """
    import torch
    import transformers

    from fastload_common.testing.tiny_models import write_tokenizer

    config = transformers.Qwen3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=layers,
        max_position_embeddings=1024,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size=GIB)
    write_tokenizer(directory)


def load(way: str, endpoint: str, variables: dict[str, str], cache: str) -> list[dict[str, Any]]:
    """Load the model by all ranks; what each of them says.

    Raises:
        RuntimeError: one of them failed; the text is its last line.
    """
    load_format, extra, more = WAYS[way]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = dict(environment()) | variables | more
    names = add_vllm_metadata(Path(cache) / "names")  # Run:ai's loader asks for vLLM's version
    environ["PYTHONPATH"] = f"{names}{os.pathsep}{environ.get('PYTHONPATH', '')}"
    environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "RUNAI_STREAMER_S3_ENDPOINT": endpoint,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "FASTLOAD_CACHE_DIR": cache,
        "VLLM_ASSETS_CACHE": cache,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    processes = []
    for rank in range(RANKS):
        job = {"rank": rank, "ranks": RANKS, "port": port, "model": f"s3://{BUCKET}/model"}
        job |= {"load_format": load_format, "extra": extra}
        command = [sys.executable, "-m", "benchmarks.clients.engine_rank", json.dumps(job)]
        processes.append(
            subprocess.Popen(
                command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"did not end in {LIMIT_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            lines = [line for line in text.splitlines() if "Error" in line] or [text[-200:]]
            raise RuntimeError(lines[-1].strip()[:300])
    return [_result(text) for text in said]


def _result(text: str) -> dict[str, Any]:
    """What the rank printed for us, among what the engine and its threads print."""
    [line] = [line for line in text.splitlines() if line.startswith(RESULT)]
    return dict(json.loads(line.removeprefix(RESULT)))


def measure(layers: int, ways: list[str]) -> dict[str, Any]:
    """One way after the other."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as name, S3Server() as server:
        model = Path(name) / "model"
        write_model(model, layers)
        server.make_bucket(BUCKET)
        server.upload_dir(model, BUCKET, "model")
        weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        for way in ways:
            if WAYS[way][0] == "runai_streamer" and not _has_runai():
                rows[way] = {"failed": "not installed"}
                continue
            with LoggingProxy(server.endpoint) as proxy:
                try:
                    said = load(way, proxy.endpoint, server.environ(), f"{name}/{len(rows)}")
                except RuntimeError as error:
                    rows[way] = {"failed": str(error)}
                    continue
                of_weights = [r for r in proxy.requests if r.path.endswith(".safetensors")]
                sent_bytes = sum(request.body_bytes for request in of_weights)
            rows[way] = {
                "sent_bytes": sent_bytes,
                "model_ratio": round(sent_bytes / weights_bytes, 4),
                "requests": len(of_weights),
                "sums": [row["sum"] for row in said],
                "cpu_s": round(sum(row["cpu_s"] for row in said), 3),
            }
    return {"weights_bytes": weights_bytes, "rows": rows}


def _has_runai() -> bool:
    return importlib.util.find_spec("runai_model_streamer_s3") is not None


def panels(found: dict[str, Any]) -> list[Panel]:
    rows = found["rows"]
    ratios = {way: row["model_ratio"] for way, row in rows.items() if "model_ratio" in row}
    notes = {way: row["failed"] for way, row in rows.items() if "failed" in row}
    title = f"vLLM at TP={RANKS}: bytes that the store sent / bytes of the model"
    return [Panel(title, "ratio", {"sent": ratios}, {f"bar {BAR}": BAR}, notes, tuple(WAYS))]


def main() -> int:
    parser, directory = options_of(__doc__)
    parser.add_argument("--only", default=";".join(WAYS), help="rows, separated by semicolons")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: run this with the environment of `make venv-vllm`")
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    layers = 8 if options.quick else 16
    ways = [way for way in WAYS if way in options.only.split(";")]
    found = {"benchmark": "node_engine", "ranks": RANKS, **measure(layers, ways)}
    rows = found["rows"]
    ours = rows.get("fastload", {})
    bars = [
        Bar("bytes of the node / bytes of the model", ours.get("model_ratio"), BAR,
            failed=ours.get("failed"))
    ]  # fmt: skip
    if not options.json:
        for way, row in rows.items():
            print(f"{way:22} {row.get('model_ratio', '-'):>8} {row.get('failed', '')}")
    return finish("node_engine", found, bars, panels, as_json=options.json, directory=directory)


if __name__ == "__main__":
    sys.exit(main())
