"""Loads of artifacts with compressed layers: unpacked once for a node, whole or not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fastload_common.cli import adapters
from fastload_common.cli.main import app
from fastload_common.clock import SystemClock
from fastload_common.config import Settings
from fastload_common.engine.object_model import fetch_model, pin_model
from fastload_common.errors import (
    DeadlineError,
    NoWeightsError,
    ObjectMissingError,
    PullError,
    SourceError,
)
from fastload_common.load.model_root import open_model_root
from fastload_common.load.unpacked_note import write_note
from fastload_common.load.unpacked_tree import remove_tree
from fastload_common.testing.scripted_registry import Answer, Asked, ScriptedRegistry
from tests.common.load.unpacked.unpacked_models import (
    RAW,
    entry,
    entry_root,
    forget,
    load,
    outcome,
    push_model,
    start,
)
from tests.common.pull.images import archive, compressed, file, sha256

# -- what users see ---------------------------------------------------------------------------


def test_a_model_in_compressed_layers_is_loaded_and_pulled_once(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    settings: Settings,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    uri = pin_model(push_model(registry, files), settings)
    found = fetch_model(uri, settings, configuration=True, tokenizer=True)
    assert json.loads((found / "config.json").read_text()) == {"model_type": "x"}
    said = [record.getMessage() for record in caplog.records if "pulled and unpacked" in record.msg]
    assert len(said) == 1
    registry.log.clear()
    facts = load(uri, settings, tensors)
    assert registry.count("/blobs/") == 0  # the configuration's process has pulled it
    assert facts["state"] == "found"
    assert facts["layers"] == len(files)
    assert facts["fetched_bytes"] == facts["size_bytes"] > 0
    assert facts["tree_bytes"] == sum(map(len, files.values()))
    assert facts["pull_s"] > 0
    assert entry(settings).stat().st_mode & 0o077 == 0


def test_raw_weights_beside_a_compressed_configuration(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    settings: Settings,
) -> None:
    layers = [
        registry.put(data, RAW, {"org.cncf.model.filepath": name})
        for name, data in files.items()
        if name.endswith(".safetensors")
    ]
    small = archive(*(file(name, data) for name, data in files.items() if name.endswith(".json")))
    kit = "application/vnd.kitops.modelkit.model.v1.tar+gzip"
    docs = "application/vnd.kitops.modelkit.docs.v1.tar+gzip"
    layers += [registry.put(compressed(small, "gzip"), kit), registry.put(b"no archive", docs)]
    registry.artifact("v", layers)
    uri = f"oci://{registry.host}/r:v"
    facts = load(uri, settings, tensors)
    assert (facts["state"], facts["files"], facts["layers"]) == ("pulled", 2, 1)
    found = fetch_model(uri, settings, configuration=True, tokenizer=True)
    assert (found / "config.json").is_file()


def test_who_only_looks_pulls_nothing(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri = push_model(registry, files)
    monkeypatch.setenv("FASTLOAD_OCI_PLAIN_HTTP", registry.host)
    monkeypatch.setenv("FASTLOAD_CACHE_DIR", str(settings.cache_dir))
    # An engine would pull while it makes its configuration: it is not even asked.
    point = SimpleNamespace(name="none", load=lambda: SimpleNamespace(check=lambda: None))
    found = SimpleNamespace(entry_points=lambda group: [point])
    monkeypatch.setattr(adapters, "metadata", found)
    looks = (["inspect"], ["advise", "--instance-type", "p5.48xlarge"], ["plan", "--engine=none"])
    for arguments in ([*look, uri] for look in looks):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, SourceError)
        assert "a load on this node pulls" in str(result.exception)
        assert "4 of 4 layers compressed (gzip, zstd)" in str(result.exception)
    result = CliRunner().invoke(app, ["doctor", uri])
    assert "a load on this node pulls" in " ".join(result.output.split())
    assert list(entry_root(settings).iterdir()) == []
    layers = [asked for asked in registry.log if "/blobs/" in asked.path]
    assert len(layers) == 1  # the one range that doctor reads
    load(uri, settings, tensors)
    result = CliRunner().invoke(app, ["inspect", uri])
    assert result.exit_code == 0, result.output
    assert "a load" not in CliRunner().invoke(app, ["doctor", uri]).output


def test_a_folder_that_is_not_there(
    registry: ScriptedRegistry, files: dict[str, bytes], settings: Settings
) -> None:
    uri = push_model(registry, files)
    with pytest.raises(ObjectMissingError, match="no such folder"):
        open_model_root(f"{uri}/other", settings)
    above = uri.removesuffix("/m")
    with pytest.raises(NoWeightsError) as caught:
        fetch_model(above, settings, configuration=True, tokenizer=True)
    assert f"such as {uri}: name one" in str(caught.value)


# -- once for a node --------------------------------------------------------------------------


class Barrier:
    """Holds back the replies for one blob until it is opened."""

    def __init__(self, registry: ScriptedRegistry, digest: str) -> None:
        self.asked, self.opened = threading.Event(), threading.Event()
        self._digest = digest
        registry.script = self._wait

    def _wait(self, asked: Asked) -> Answer | None:
        if asked.path.endswith(self._digest):
            self.asked.set()
            self.opened.wait(60)
        return None


def test_of_many_processes_one_pulls(
    registry: ScriptedRegistry, files: dict[str, bytes], settings: Settings
) -> None:
    uri = push_model(registry, files)
    last = compressed(archive(file("m/tokenizer.json", b"{}")), "zstd")
    barrier = Barrier(registry, sha256(last))
    processes = [start(uri, settings)]
    assert barrier.asked.wait(60)
    processes += [start(uri, settings) for _ in range(3)]
    wait_until_asked(registry, "/manifests/", 5)
    barrier.opened.set()
    found = [outcome(process) for process in processes]
    assert found[0]["state"] == "pulled"
    assert {one["state"] for one in found[1:]} <= {"waited", "found"}
    assert len({one["root"] for one in found}) == 1
    layers = [digest for digest in registry.blobs if registry.count(f"/blobs/{digest}")]
    # The reply that was held back may look slow, and be asked for a second time.
    raced = {digest: 1 + (digest == sha256(last)) for digest in layers}
    assert all(registry.count(f"/blobs/{digest}") <= most for digest, most in raced.items())


def wait_until_asked(registry: ScriptedRegistry, part: str, count: int) -> None:
    clock, never = SystemClock(), threading.Event()
    end_s = clock.monotonic_s() + 60
    while registry.count(part) < count and clock.monotonic_s() < end_s:
        clock.wait(never, 0.01)
    assert registry.count(part) >= count


def test_where_the_puller_is_killed_another_goes_on(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    settings: Settings,
) -> None:
    uri = push_model(registry, files)
    last = compressed(archive(file("m/tokenizer.json", b"{}")), "zstd")
    barrier = Barrier(registry, sha256(last))
    first = start(uri, settings)
    assert barrier.asked.wait(60)
    second = start(uri, settings)
    wait_until_asked(registry, "/manifests/", 3)
    assert not (entry(settings) / "tree").exists()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    barrier.opened.set()
    assert outcome(second)["state"] == "pulled"
    assert load(uri, settings, tensors)["state"] == "found"


def test_half_a_directory_is_never_read(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    settings: Settings,
) -> None:
    """An `rm -r` that was interrupted, whichever files it took first."""
    uri = push_model(registry, files)
    for taken in ("tree/m/config.json", "complete.json", "tree/m", "tree", "lock"):
        load(uri, settings, tensors)
        _unlink(entry(settings) / taken)
        state = load(uri, settings, tensors)["state"]
        assert state == ("found" if taken == "lock" else "pulled"), taken


def _unlink(path: Path) -> None:
    if path.is_dir():
        remove_tree(path)
    else:
        path.unlink()


def test_what_was_pulled_to_its_end_needs_no_second_pull(
    registry: ScriptedRegistry,
    files: dict[str, bytes],
    tensors: dict[str, torch.Tensor],
    settings: Settings,
) -> None:
    """Ended between the pull and its note: believed in the same start of the machine only."""
    uri = push_model(registry, files)
    load(uri, settings, tensors)
    complete, note = entry(settings) / "complete.json", entry(settings) / "pulled"
    wanted = json.loads(complete.read_text())["facts"]
    for damage, asked in (("", False), ("reboot", True), ("half removed", True), ("cut off", True)):
        complete.unlink()
        write_note(note, wanted)
        if damage == "reboot":
            note.write_text(json.dumps(json.loads(note.read_text()) | {"boot": "another"}))
        elif damage == "half removed":
            (entry(settings) / "tree/m/config.json").unlink()
        elif damage == "cut off":
            note.write_text(note.read_text()[:-9])
        forget()
        registry.log.clear()
        load(uri, settings, tensors)
        assert (registry.count("/blobs/") > 0) == asked, damage
        assert not note.exists()
        found = json.loads(complete.read_text())["facts"]
        assert found["entries"] == wanted["entries"]
        assert found["layers"] == wanted["layers"]


def test_the_deadline_counts_while_waiting(
    registry: ScriptedRegistry, files: dict[str, bytes], settings: Settings
) -> None:
    uri = push_model(registry, files)
    open_model_root(uri, settings)
    (entry(settings) / "complete.json").unlink()
    forget()
    other = start_holder(entry(settings) / "lock")
    with pytest.raises(DeadlineError, match="was not unpacked within"):
        open_model_root(uri, replace(settings, deadline_s=0.3))

    def ended() -> None:
        raise PullError("another rank has failed")

    with pytest.raises(PullError, match="another rank has failed"):
        open_model_root(uri, settings, check=ended)
    other.communicate("")


def start_holder(lock: Path) -> subprocess.Popen[str]:
    code = (
        "import fcntl, sys\n"
        "stream = open(sys.argv[1], 'r+')\n"
        "fcntl.flock(stream, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process
