"""What an operator sees where the model cannot be loaded: one line, and nothing left running."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from fastload_common.testing.s3_server import S3Server
from tests.sglang.server import command, environment, run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.s3,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
    ),
]

BUCKET = "sglang-bad-input"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Path:
    from fastload_common.testing.tiny_models import write_tiny_model

    root = tmp_path_factory.mktemp("models")
    s3_server.make_bucket(BUCKET)
    write_tiny_model(root / "good", "qwen3")
    cut = shutil.copytree(root / "good", root / "cut")
    shard = sorted(cut.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4096])
    other = shutil.copytree(root / "good", root / "other")
    config = json.loads((other / "config.json").read_text())
    # Narrower ones would do no harm: the engine pads them.
    more = {"vocab_size": config["vocab_size"] * 2}
    (other / "config.json").write_text(json.dumps(config | more))
    for directory in root.iterdir():
        s3_server.upload_dir(directory, BUCKET, directory.name)
    return root


@pytest.fixture
def variables(
    models: Path, s3_server: S3Server, tmp_path: Path, request: pytest.FixtureRequest
) -> dict[str, str]:
    return environment(tmp_path, s3_server.environ(), ranks=2)


def own_errors(output: str) -> list[str]:
    return re.findall(r"fastload: (\w+Error: .*)", output)


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("s3://no-such-bucket/m", {}, "ObjectMissingError: .*no-such-bucket"),
        (
            f"s3://{BUCKET}/good",
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            "AccessDeniedError: ",
        ),
        (f"s3://{BUCKET}/cut", {}, "ShardTruncatedError: .*model-00002"),
    ],
    ids=["no bucket", "403", "cut"],
)
def test_what_the_first_process_finds_is_one_line_and_starts_no_other(
    variables: dict[str, str], model: str, more: dict[str, str], words: str
) -> None:
    status, output, left = run(
        variables | more, *command(model, "--load-format", "fastload"), timeout_s=300
    )
    assert status == 1
    assert left == []
    assert "Traceback" not in output
    [error] = own_errors(output)
    assert re.match(words, error)
    assert " -> " in error
    assert "scheduler" not in output.lower()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_rank_finds_is_said_once_and_ends_all(variables: dict[str, str], ranks: int) -> None:
    """A checkpoint of another model than its configuration says."""
    status, output, left = run(
        variables if ranks > 1 else {k: v for k, v in variables.items() if "OMP" not in k},
        *command(f"s3://{BUCKET}/other", "--load-format", "fastload", "--tp", str(ranks)),
    )
    assert status != 0
    assert left == []
    errors = own_errors(output)
    assert len(errors) == 1, output[-4000:]
    # With two ranks the first to speak may tell what the other one told it.
    assert "TensorMismatchError: " in errors[0]
    assert "vocab" in errors[0]
    assert "fastload_common/" not in output


def test_sglang_serve_does_the_same(variables: dict[str, str]) -> None:
    program = str(Path(sys.executable).parent / "sglang")
    arguments = command("s3://no-such-bucket/m", "--load-format", "fastload")[3:]
    status, output, left = run(variables, program, "serve", *arguments, timeout_s=300)
    assert status == 1
    assert left == []
    [error] = own_errors(output)
    assert error.startswith("ObjectMissingError: ")
