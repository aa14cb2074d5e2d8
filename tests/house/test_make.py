"""The Makefile and the scripts: every target can be planned, every script can be parsed."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess

import pytest

from tests.house.tree import ROOT, project_files, relative

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environ
    )


@needs_make
def test_help_lists_what_the_readme_promises() -> None:
    done = run("make", "-s", "help")
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in done.stdout
        assert f"make {target}" in readme


@needs_make
def test_make_test_runs_everything_in_both_environments() -> None:
    done = run("make", "-n", "test", "VENV=/nowhere/a", "VENV_VLLM=/nowhere/b")
    assert done.returncode == 0, done.stderr
    for part in (
        "/nowhere/a/bin/ruff format --check",
        "/nowhere/a/bin/ruff check",
        "/nowhere/a/bin/mypy",
        "/nowhere/a/bin/lint-imports",
        "/nowhere/a/bin/python -m pytest tests",
        "/nowhere/b/bin/python -m pytest tests/vllm",
    ):
        assert part in done.stdout


@needs_make
@pytest.mark.parametrize(
    "target",
    [
        *("venv", "venv-vllm", "venv-sglang", "demo", "demo-sglang", "storm", "exchange-storm"),
        "compile-storm",
        *("sweep", "sweep-sglang", "test-sglang", "bench", "docs", "clean"),
    ],
)
def test_every_target_can_be_planned(target: str) -> None:
    done = run("make", "-n", target)
    assert done.returncode == 0, done.stderr


def test_of_sglang_what_a_cpu_can_use_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "engine_requirements.py"))
    asked = ["torch==9.9", "transformers==5.1", "IPython", "flashinfer_python==1", "pyzmq>=2"]
    monkeypatch.setattr(script["metadata"], "requires", lambda name: asked)
    names = ROOT / ".ci" / "sglang_names.txt"
    found = script["selected"]("sglang", names, "torch==2.13.0")
    assert {"torch==2.13.0", "transformers==5.1", "IPython", "pyzmq>=2", "uvloop"} <= set(found)
    assert not any(line.startswith(("flashinfer", "torch==9", "#")) for line in found)


def test_an_engine_is_installed_with_any_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "numpy",
        "torch==2.13.0+cpu; python_version >= '3'",
        "torch==2.13.0; python_version < '3'",
        "torchvision",
        "fastapi[standard]>=0.1",
        "boto3; extra == 'more'",
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: wanted)
    script = runpy.run_path(str(ROOT / ".ci" / "engine_requirements.py"))
    assert script["requirements"]("any") == ["numpy", "torch==2.13.0", "fastapi[standard]>=0.1"]


def test_scripts_are_executable_and_parse() -> None:
    scripts = [ROOT / ".ci" / "run", *(p for p in project_files() if p.suffix == ".sh")]
    assert len(scripts) > 1
    for script in scripts:
        assert os.access(script, os.X_OK), relative(script)
        shell = script.read_text(encoding="utf-8").splitlines()[0].split("/")[-1].split()[-1]
        done = run(shell, "-n", str(script))
        assert done.returncode == 0, done.stderr
