"""Builds SGLang's configuration as its command line does. Not a test itself.

    python config_worker.py JSON
    [{"argv": [...], "then": "format"?}, ...]

prints one JSON object a line for each job, after the word RESULT: what was decided, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def decide(argv: list[str]) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils.runai_utils import ObjectStorageModel, is_runai_obj_uri

    arguments = prepare_server_args(argv)
    arguments.resolve_once()
    view = resolving_view(arguments)
    paths = {
        name: str(getattr(view, name))
        for name in ("model_path", "tokenizer_path", "speculative_draft_model_path")
    }
    return {
        "load_format": view.load_format,
        "draft_format": view.speculative_draft_load_format,
        "served_model_name": view.served_model_name,
        **paths,
        "files": {
            name: sorted(f.name for f in Path(ObjectStorageModel.get_path(path)).glob("[!.]*"))
            for name, path in paths.items()
            if is_runai_obj_uri(path)
        },
    }


def loader_of(load_format: str) -> dict[str, Any]:
    """Which loader a load format gives, and what a configuration says that names it."""
    from sglang.srt.configs.load_config import LoadConfig

    config = LoadConfig(load_format=load_format)
    kind: Any = config.load_format
    return {"load_format": kind.__name__ if isinstance(kind, type) else str(kind.value)}


def main(jobs: list[dict[str, Any]]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for job in jobs:
        try:
            found = decide(job["argv"]) if "argv" in job else loader_of(job["loader"])
        except SystemExit as error:
            found = {"error": f"SystemExit: {error.code}"}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        found["modules"] = [name for name in ("runai_model_streamer",) if name in sys.modules]
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
