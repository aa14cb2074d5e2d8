"""Serve a small random model straight from S3 with a real engine and compare its tokens.

Run by ``make demo`` (vLLM) and ``make demo-sglang``. Starts an S3 server on this machine that
checks credentials, makes a random Qwen3 with a tokenizer, uploads it, and serves it four times:
with the engine's default loader from the directory and with fastload from S3, each with one and
with two ranks. Prints fastload's reports and whether the greedy tokens are equal. Leaves nothing
running and nothing on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fastload_common.testing import sglang_cpu
from fastload_common.testing.s3_server import S3Server, free_port
from fastload_common.testing.tiny_models import write_tiny_model
from fastload_common.testing.vllm_cpu import add_vllm_metadata
from fastload_common.units import format_size

BUCKET = "models"
PREFIX = "tiny-qwen3"
PROMPT = "The quick brown fox jumps over the lazy dog."
TOKENS = 24
START_DEADLINE_S = 400.0
STOP_DEADLINE_S = 30.0


class DemoError(Exception):
    """The demo did not show what it is there to show."""


class Engine(Protocol):
    """What differs between engines.

    Attributes:
        name: as its makers write it.
        segments: patterns of the segments of shared memory that it leaves behind.
    """

    name: str
    segments: tuple[str, ...]

    def command(self, model: str, load_format: str, ranks: int, port: int) -> list[str]: ...

    def variables(self, work: Path, ranks: int) -> dict[str, str]: ...

    def completion(self, port: int) -> dict[str, Any]:
        """Greedy tokens after the prompt, and their log-probabilities."""
        ...


class Vllm:
    name: str = "vLLM"
    segments: tuple[str, ...] = ("vllm_*", "psm_*")

    def command(self, model: str, load_format: str, ranks: int, port: int) -> list[str]:
        return [
            str(Path(sys.executable).parent / "vllm"),
            *("serve", model, "--load-format", load_format),
            *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
            *("--tensor-parallel-size", str(ranks), "--max-model-len", "256"),
            *("--max-num-seqs", "4", "--dtype", "bfloat16", "--enforce-eager"),
        ]

    def variables(self, work: Path, ranks: int) -> dict[str, str]:
        named = str(add_vllm_metadata(work / "metadata"))
        mine = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(work / "vllm-cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, [named, os.environ.get("PYTHONPATH")])),
        }
        if ranks > 1:
            # One core a rank; vLLM's own choice needs a NUMA node for each.
            cores = sorted(os.sched_getaffinity(0))
            mine["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(ranks)
            )
        return mine

    def completion(self, port: int) -> dict[str, Any]:
        request = {
            "model": "demo",
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        choice = ask(port, "/v1/completions", request)["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
        return {"token_ids": choice.get("token_ids"), "logprobs": logprobs}


class Sglang:
    name: str = "SGLang"
    segments: tuple[str, ...] = ("sglang_*", "sgl_*")

    def command(self, model: str, load_format: str, ranks: int, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *("--load-format", load_format, "--tp", str(ranks), "--skip-server-warmup"),
            *("--host", "127.0.0.1", "--port", str(port), *sglang_cpu.ARGUMENTS),
        ]

    def variables(self, work: Path, ranks: int) -> dict[str, str]:
        return sglang_cpu.variables(ranks) | {"SGLANG_CACHE_DIR": str(work / "sglang-cache")}

    def completion(self, port: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        request = {"text": PROMPT, "sampling_params": sampling, "return_logprob": True}
        answer = ask(port, "/generate", request)
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return {"token_ids": answer["output_ids"], "logprobs": logprobs}


ENGINES: dict[str, Engine] = {"vllm": Vllm(), "sglang": Sglang()}


def main() -> int:
    engine = ENGINES[sys.argv[1] if len(sys.argv) > 1 else "vllm"]
    # Ctrl-C and a CI's SIGTERM must both run the clean-up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started_s = time.monotonic()
    shared_before = shared_memory(engine)
    work = Path(tempfile.mkdtemp(prefix="fastload-demo-"))
    try:
        equal = run(engine, work)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
        # The engine leaves its segments behind when it is stopped.
        for segment in shared_memory(engine) - shared_before:
            segment.unlink(missing_ok=True)
    print(f"\ndemo took {time.monotonic() - started_s:.0f} s; nothing is left running")
    return 0 if equal else 1


def shared_memory(engine: Engine) -> set[Path]:
    """The engine's segments of shared memory on this machine."""
    return {path for pattern in engine.segments for path in Path("/dev/shm").glob(pattern)}


def run(engine: Engine, work: Path) -> bool:
    """Do all of it; True if every pair of completions is equal."""
    model = work / "model"
    model.mkdir()
    write_tiny_model(model, "qwen3")
    size_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    say(f"made a random Qwen3 with {format_size(size_bytes)} of weights")
    report = work / "report.jsonl"
    equal = True
    with S3Server() as server:
        server.make_bucket(BUCKET)
        count = server.upload_dir(model, BUCKET, PREFIX)
        uri = f"s3://{BUCKET}/{PREFIX}"
        say(f"uploaded {count} files to {uri} on {server.endpoint}")
        for ranks in (1, 2):
            expected = completion(engine, work, str(model), ranks, "auto", {})
            s3 = server.environ() | {"FASTLOAD_REPORT": str(report)}
            # From here the weights are in S3 only for fastload: it gets no path to them.
            got = completion(engine, work, uri, ranks, "fastload", s3)
            same = got == expected
            equal = equal and same
            say(f"TP={ranks} default loader, directory: {expected['token_ids']}")
            say(f"TP={ranks} fastload, S3:              {got['token_ids']}")
            say(f"TP={ranks} tokens are {'equal' if same else 'DIFFERENT'}")
    show_reports(report)
    return equal


def completion(
    engine: Engine, work: Path, model: str, ranks: int, load_format: str, variables: dict[str, str]
) -> dict[str, Any]:
    """Serve the model and ask one greedy completion; returns its tokens and their logprobs."""
    port = free_port()
    name = f"{load_format}-tp{ranks}"
    command = engine.command(model, load_format, ranks, port)
    say(f"TP={ranks} {engine.name} serves {model} with --load-format {load_format}")
    began_s = time.monotonic()
    environ = environment(engine, work, ranks, variables)
    with served(command, environ, work / f"{name}.log") as process:
        wait_until_ready(process, port, work / f"{name}.log")
        say(f"TP={ranks} ready after {time.monotonic() - began_s:.0f} s")
        found = engine.completion(port)
    if not found["token_ids"]:
        raise DemoError(f"{name}: the completion has no token ids")
    show_fastload_lines(work / f"{name}.log")
    return found


def environment(
    engine: Engine, work: Path, ranks: int, variables: dict[str, str]
) -> dict[str, str]:
    """The server's variables: the caller's, without their S3 settings, plus the demo's."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "FASTLOAD_")) and not name.endswith("_PLUGINS")
    }
    (work / "tmp").mkdir(exist_ok=True)
    mine |= {"TMPDIR": str(work / "tmp"), "FASTLOAD_CACHE_DIR": str(work / "fastload-cache")}
    return mine | engine.variables(work, ranks) | variables


@contextlib.contextmanager
def served(
    command: list[str], variables: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a session of its own; end all of that session afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_gone(process.pid)


def wait_until_gone(session: int) -> None:
    """Wait until no process of the session is left; say so when one stays."""
    deadline_s = time.monotonic() + STOP_DEADLINE_S
    while left := members(session):
        if time.monotonic() > deadline_s:
            raise DemoError(f"processes {left} did not end")
        time.sleep(0.1)


def members(session: int) -> list[int]:
    """Living processes of a session, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        if process.poll() is not None:
            raise DemoError(f"the server ended with {process.returncode}:\n{tail(log)}")
        if time.monotonic() > deadline_s:
            raise DemoError(f"it did not answer in {START_DEADLINE_S:.0f} s:\n{tail(log)}")
        time.sleep(0.5)


def ask(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        raise DemoError(f"the server answered {error.code}: {text[:2000]}") from None


def show_fastload_lines(log: Path) -> None:
    """What fastload itself said in the server's log."""
    for line in log.read_text(errors="replace").splitlines():
        if "fastload: rank" in line:
            say("log: " + line[line.index("fastload: rank") :])


def show_reports(report: Path) -> None:
    if not report.exists():
        raise DemoError("fastload wrote no report")
    for line in report.read_text().splitlines():
        entry = json.loads(line)
        say(
            f"report of rank {entry['rank']}/{entry['world_size']}: {entry['status']}, "
            f"{format_size(entry['needed_bytes'])} needed of {format_size(entry['model_bytes'])}, "
            f"{format_size(entry['fetched_bytes'])} fetched, {entry['requests']} requests, "
            f"{entry['retries']} retries, {entry['wall_s']:.2f} s, phases "
            + ", ".join(f"{k} {v:.3f}" for k, v in entry["phases_s"].items())
        )


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
