"""The content of a model as far as compiling depends on it: digests of files, never their place.

Weights are not read: which values a parameter has decides nothing but where an engine freezes them
into the code, and then it must say so (``model.weights``).
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastload_common.compile_cache.key import canonical
from fastload_common.errors import FactorsInvalidError

__all__ = ["decides_code", "model_content", "model_content_of"]

_PATTERNS = (
    "config.json",
    "params.json",
    "*quant*config*.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.py",
)
# Where the author's copy lay, and which release wrote the file.
_NOISE = ("_name_or_path", "transformers_version")


def decides_code(name: str) -> bool:
    """Whether a file of a model (``/`` between parts) is part of its content here."""
    parts = name.split("/")
    if any(part.startswith(".") for part in parts):
        return False
    own = len(parts) == 1
    return any(
        fnmatch.fnmatchcase(parts[-1], pattern) and (own or pattern == "*.py")
        for pattern in _PATTERNS
    )


def model_content(files: Mapping[str, bytes]) -> dict[str, str]:
    """Digest of each file that decides the code, for the factor ``model.content``.

    JSON is compared by what it says, without the names of places in it. Other files are left out,
    so all of a model's small files may be given.

    Raises:
        FactorsInvalidError: there is no configuration among them.
    """
    found = {name: _digest(name, files[name]) for name in sorted(files) if decides_code(name)}
    if not {"config.json", "params.json"}.intersection(found):
        raise FactorsInvalidError(
            "the model has no config.json, so nothing says what its artefacts depend on"
        )
    return found


def model_content_of(directory: Path) -> dict[str, str]:
    """The same for a directory.

    Raises:
        FactorsInvalidError: no configuration.
        OSError: it cannot be read.
    """
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if decides_code(name) and path.is_file():
            files[name] = path.read_bytes()
    return model_content(files)


def _digest(name: str, data: bytes) -> str:
    if name.endswith(".json"):
        # What is not JSON, whatever its name says, is compared by its bytes.
        with contextlib.suppress(ValueError, RecursionError):
            data = canonical(_without_noise(json.loads(data)))
    return hashlib.sha256(data).hexdigest()


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_noise(item) for key, item in value.items() if key not in _NOISE}
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    return value
