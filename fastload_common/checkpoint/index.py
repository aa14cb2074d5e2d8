"""Parse ``*.safetensors.index.json``: which file holds which tensor. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fastload_common.checkpoint.strict_json import parse_json
from fastload_common.checkpoint.wording import short
from fastload_common.errors import CheckpointError

__all__ = ["CheckpointIndex", "natural_order", "parse_index"]

_HINT = "upload the index that belongs to the shards, or remove it if there is one file only"
_DIGITS = re.compile("([0-9]+)")
_UNSAFE = re.compile(r"[\\\x00-\x1f]")


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """A parsed index.

    Attributes:
        key: of the index file itself, relative to the source's root.
        weight_map: tensor -> key of its file, relative to the source's root.
        files: the keys named, each once, in natural order.
    """

    key: str
    weight_map: dict[str, str]
    files: tuple[str, ...]

    def tensor_counts(self) -> Counter[str]:
        """How many tensors the index expects in each file."""
        return Counter(self.weight_map.values())


def parse_index(text: bytes, *, key: str, root: str) -> CheckpointIndex:
    """Parse an index file.

    Args:
        text: the file's content.
        key: its key; the files it names stand beside it.
        root: the source's root, for errors.

    Raises:
        CheckpointError: not JSON, no ``weight_map``, or one that names a file outside the root,
            a file that is no safetensors file, or two files for one tensor.
    """
    uri = f"{root}/{key}"
    try:
        document = parse_json(text.decode("utf-8-sig"))
    except ValueError as error:
        raise CheckpointError(f"{uri} is not valid JSON: {error}", hint=_HINT) from None
    weight_map = dict(document).get("weight_map") if isinstance(document, tuple) else None
    if not isinstance(weight_map, tuple) or not weight_map:
        raise CheckpointError(
            f"{uri} is no index: expected an object with a non-empty object `weight_map`",
            hint=_HINT,
        )
    folder = key.rpartition("/")[0]
    targets: dict[str, str] = {}
    files: dict[str, str] = {}
    for name, file in weight_map:
        target = targets.get(file) if isinstance(file, str) else None
        if target is None:
            problem = _problem(file)
            if problem:
                raise CheckpointError(
                    f"{uri} maps tensor {short(name)} to {short(file)}: {problem}", hint=_HINT
                )
            target = targets[file] = f"{folder}/{file}" if folder else file
        if files.setdefault(name, target) != target:
            raise CheckpointError(
                f"{uri} maps tensor {short(name)} to two files, {files[name]} and {target}",
                hint=_HINT,
            )
    return CheckpointIndex(
        key=key,
        weight_map=files,
        files=tuple(sorted(set(files.values()), key=natural_order)),
    )


def natural_order(key: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which ``model-2`` comes before ``model-10``."""
    parts = _DIGITS.split(key)
    order = [
        # A number as its length and digits: no limit on how long it is.
        (1, len(part.lstrip("0")), part.lstrip("0")) if position % 2 else (0, 0, part)
        for position, part in enumerate(parts)
    ]
    return (*order, (2, 0, key))


def _problem(file: Any) -> str:
    if not isinstance(file, str):
        return "not a file name"
    if file.startswith("/") or _UNSAFE.search(file):
        return "not a path relative to the index"
    if any(part in ("", ".", "..") for part in file.split("/")):
        return "the path must not leave the model's folder"
    if not file.endswith(".safetensors"):
        return "not a .safetensors file"
    return ""
