"""Choose which files of a model are its weights. Pure: keys in, keys out.

The rules, in this order:

1. Only files at the model's own level count; folders such as ``original/`` do not.
2. Explicit patterns (an engine's) decide alone: the first that matches anything, as in vLLM.
3. Otherwise one *set* is chosen: Mistral's own (``consolidated*``) or Hugging Face's (all others).
4. The set's index decides the files. Without one: all files of the set, except adapters; names
   of the form ``x-00001-of-00004`` must then be complete.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fastload_common.checkpoint.index import CheckpointIndex, natural_order
from fastload_common.checkpoint.nothing_found import no_weights
from fastload_common.checkpoint.patterns import matches, matches_any
from fastload_common.checkpoint.wording import enumerate_some
from fastload_common.errors import CheckpointError, ConfigError, ShardMissingError

__all__ = [
    "INDEX_SUFFIX",
    "PREFERENCES",
    "FileChoice",
    "choose_files",
    "choose_index",
    "missing_shards",
    "usual_names",
]

INDEX_SUFFIX = ".safetensors.index.json"
PREFERENCES = ("hf", "mistral", "auto")
"""``hf`` and ``mistral`` ask for that set; ``auto`` takes hf's where there is one."""

_SUFFIX = ".safetensors"
_HF_INDEX = "model" + INDEX_SUFFIX
_MISTRAL_INDEX = "consolidated" + INDEX_SUFFIX
_MISTRAL = "consolidated"
_ADAPTER = "adapter_"
_WEIGHT_SUFFIXES = (_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_NUMBERED = re.compile(
    r"(?P<stem>.*[-_.])(?P<number>[0-9]{2,9})-of-(?P<total>[0-9]{2,9})\.safetensors"
)


@dataclass(frozen=True, slots=True)
class FileChoice:
    """The files of a model.

    Attributes:
        files: keys in natural order; never empty.
        ignored: other weight files at the model's level.
    """

    files: tuple[str, ...]
    ignored: tuple[str, ...]


def choose_index(
    keys: Iterable[str],
    *,
    root: str,
    prefer: str = "hf",
    patterns: Sequence[str] | None = None,
) -> str | None:
    """Find the index file that decides.

    Args:
        keys: all keys at the model's level.
        root: the source's root, for errors.
        prefer: see `PREFERENCES`.
        patterns: explicit patterns; they decide without an index.

    Returns:
        Its key, or None where there is none for the set that is asked for.

    Raises:
        CheckpointError: several, and none has the usual name.
    """
    _check_preference(prefer)
    if patterns is not None:
        return None
    indexes = sorted(key for key in keys if "/" not in key and key.endswith(INDEX_SUFFIX))
    if prefer != "mistral":
        if _HF_INDEX in indexes:
            return _HF_INDEX
        others = [key for key in indexes if not key.startswith(_MISTRAL)]
        if len(others) > 1:
            raise CheckpointError(
                f"{root} has several index files: {enumerate_some(others)}",
                hint=f"name the one that counts {_HF_INDEX}",
            )
        if others:
            return others[0]
        if prefer == "hf" or any(_is_hf_weight(key) for key in keys):
            return None
    return _MISTRAL_INDEX if _MISTRAL_INDEX in indexes else None


def choose_files(
    keys: Iterable[str],
    *,
    root: str,
    index: CheckpointIndex | None = None,
    prefer: str = "hf",
    patterns: Sequence[str] | None = None,
    ignore_patterns: Sequence[str] = (),
    select: Callable[[str], bool] | None = None,
) -> FileChoice:
    """Choose the model's weight files.

    Args:
        keys: all keys at the model's level (and below it, if a pattern looks there).
        root: the source's root, for errors.
        index: the parsed index that `choose_index` named.
        prefer: see `PREFERENCES`.
        patterns: globs of an engine, such as vLLM's ``allow_patterns_overrides``.
        ignore_patterns: the operator's globs of files that are never read.
        select: a further condition on keys; what it refuses is not read.

    Raises:
        NoWeightsError: nothing to load; says what stands there instead.
        ShardMissingError: files that the index, or the numbering, wants are not there.
        ConfigError: the index wants a file that ``ignore_patterns`` excludes.
    """
    _check_preference(prefer)
    present = sorted(set(keys), key=natural_order)
    level = [key for key in present if "/" not in key]
    usable = [
        key
        for key in present
        if not matches_any(key, ignore_patterns) and (select is None or select(key))
    ]
    if patterns is not None:
        files = _by_patterns(usable, patterns)
    elif index is not None:
        files = _by_index(present, index, root, ignore_patterns, select)
    else:
        files = _by_names([key for key in usable if "/" not in key], root, prefer)
    if not files:
        raise no_weights(root, present, prefer=prefer, patterns=patterns)
    chosen = set(files)
    return FileChoice(
        files=tuple(files),
        ignored=tuple(key for key in level if key.endswith(_WEIGHT_SUFFIXES) and key not in chosen),
    )


def usual_names(prefer: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names to try where nothing may be listed: index files, then single weight files."""
    _check_preference(prefer)
    hf, mistral = (_HF_INDEX, "model" + _SUFFIX), (_MISTRAL_INDEX, _MISTRAL + _SUFFIX)
    sets = {"hf": (hf,), "mistral": (mistral,), "auto": (hf, mistral)}[prefer]
    return tuple(index for index, _ in sets), tuple(file for _, file in sets)


def _check_preference(prefer: str) -> None:
    if prefer not in PREFERENCES:
        raise ConfigError(
            f"unknown set of weights {prefer!r}", hint=f"one of {', '.join(PREFERENCES)}"
        )


def _is_hf_weight(key: str) -> bool:
    return "/" not in key and key.endswith(_SUFFIX) and not key.startswith((_MISTRAL, _ADAPTER))


def _by_patterns(keys: Sequence[str], patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        matched = [key for key in keys if matches(key, pattern)]
        if matched:
            return [key for key in matched if key.endswith(_SUFFIX)]
    return []


def _by_index(
    present: Sequence[str],
    index: CheckpointIndex,
    root: str,
    ignore_patterns: Sequence[str],
    select: Callable[[str], bool] | None,
) -> list[str]:
    there = set(present)
    counts = index.tensor_counts()
    # A folder that the index names was perhaps not listed: its files are looked at one by one.
    missing = [file for file in index.files if file not in there and "/" not in file]
    if missing:
        raise missing_shards(root, index.key, {file: counts[file] for file in missing})
    for file in index.files:
        if matches_any(file, ignore_patterns):
            raise ConfigError(
                f"{root}/{index.key} lists {file}, which ignore_patterns excludes",
                hint="change FASTLOAD_IGNORE_PATTERNS",
            )
    return [file for file in index.files if select is None or select(file)]


def missing_shards(root: str, index_key: str, counts: dict[str, int]) -> ShardMissingError:
    """The error for files that the index lists and nobody has.

    Args:
        root: the source's root.
        index_key: key of the index.
        counts: missing key -> how many tensors the index expects in it.
    """
    shards = ", ".join(f"{file} ({count} tensors)" for file, count in counts.items())
    return ShardMissingError(
        f"{root} lacks {len(counts)} of the files that {index_key} lists: {shards}",
        hint="the upload or download is incomplete; copy the missing files",
        missing_shards=len(counts),
        missing_tensors=sum(counts.values()),
    )


def _by_names(level: Sequence[str], root: str, prefer: str) -> list[str]:
    hf = [key for key in level if _is_hf_weight(key)]
    mistral = [key for key in level if key.startswith(_MISTRAL) and key.endswith(_SUFFIX)]
    files = {"hf": hf, "mistral": mistral, "auto": hf or mistral}[prefer]
    _check_numbering(files, root)
    return files


def _check_numbering(files: Sequence[str], root: str) -> None:
    """Without an index, numbered names still tell how many files there must be."""
    groups: dict[tuple[str, str, int], set[int]] = {}
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            stem, number, total = match.group("stem", "number", "total")
            groups.setdefault((stem, total, len(number)), set()).add(int(number))
    for (stem, total, width), numbers in groups.items():
        first = 0 if 0 in numbers else 1
        missing = sorted(set(range(first, first + min(int(total), 100_000))) - numbers)
        if missing:
            names = [f"{stem}{number:0{width}}-of-{total}{_SUFFIX}" for number in missing]
            raise ShardMissingError(
                f"{root} lacks {len(names)} of the files that the numbering promises, and has no "
                f"index: {enumerate_some(names, limit=100)}",
                hint="the upload or download is incomplete; copy the missing files and the index",
                missing_shards=len(names),
            )
