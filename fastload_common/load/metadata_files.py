"""Which objects of a model are metadata: keys and sizes in, choice out."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastload_common.checkpoint.patterns import matches_any
from fastload_common.errors import AccessDeniedError, ObjectMissingError
from fastload_common.load.all_at_once import all_at_once
from fastload_common.load.listing import list_root, only_listing_is_denied
from fastload_common.source.base import ListedObject, ObjectSource
from fastload_common.units import MIB, format_size

__all__ = [
    "MODULES",
    "WEIGHT_SUFFIX",
    "Listing",
    "choose_metadata",
    "list_or_guess",
    "module_folders",
]

logger = logging.getLogger(__name__)

WEIGHT_SUFFIX = ".safetensors"
MODULES = "modules.json"
"""Sentence-transformers: the modules of a model and their folders."""

MAX_FILE_BYTES = 256 * MIB
"""Larger than any tokenizer; a file above it is data under an unusual name."""

MAX_FILES = 2000
"""More than any model's metadata; a root with more is a root of many models."""

_WEIGHT_SUFFIXES = (
    WEIGHT_SUFFIX,
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".npz",
    ".npy",
    ".tensors",
    ".tflite",
    ".mlmodel",
    ".engine",
    ".plan",
    ".distcp",
    ".nemo",
)
_OTHER_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".gif",
    ".webp",
    ".svg",
    ".mp3",
    ".mp4",
    ".wav",
    ".pdf",
    ".parquet",
    ".arrow",
    ".tar",
    ".gz",
    ".zip",
    ".zst",
)
"""What no configuration or tokenizer is stored in."""

_TRAINING_STATE = re.compile(r"(?:^|/)checkpoint-[0-9]+/")

_USUAL_NAMES = (
    "config.json",
    "generation_config.json",
    "params.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    MODULES,
    "1_Pooling/config.json",
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
)
"""Asked one by one where listing is not allowed."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What stands below a root.

    Attributes:
        objects: with their states.
        is_whole: False where only usual names were asked for; other objects may be there.
    """

    objects: Sequence[ListedObject]
    is_whole: bool


def list_or_guess(source: ObjectSource) -> Listing:
    """List the root; where that is not allowed, ask for the usual names.

    Raises:
        AccessDeniedError: the credentials are refused, or neither listing nor any usual name is
            allowed.
        ObjectMissingError: no such bucket or directory.
    """
    try:
        return Listing(list_root(source, recursive=True), is_whole=True)
    except AccessDeniedError as denied:
        if not only_listing_is_denied(denied):
            raise
        found = all_at_once(lambda key: _probe(source, key), _USUAL_NAMES, threads=16)
        objects = [item for item in found if item is not None]
        if not objects:
            raise
        logger.warning(
            "fastload: %s may not be listed (%s); only files with usual names are found",
            source.root,
            denied.what,
        )
        return Listing(objects, is_whole=False)


def _probe(source: ObjectSource, key: str) -> ListedObject | None:
    try:
        return ListedObject(key, source.stat(key))
    except (ObjectMissingError, AccessDeniedError):
        # Without permission to list, S3 answers "denied" for what is not there.
        return None


def choose_metadata(
    listing: Iterable[ListedObject],
    ignore_patterns: Sequence[str],
    module_folders: Sequence[str] = (),
    *,
    root: str,
) -> list[ListedObject]:
    """Choose the small files that are no weights, wherever they lie below the root.

    Args:
        listing: all objects.
        ignore_patterns: globs of keys to leave out.
        module_folders: folders whose small weights are wanted as files all the same.
        root: for log lines.
    """
    chosen: dict[str, ListedObject] = {}
    for item in listing:
        key, size_bytes = item.key, item.object_id.size_bytes
        if not _wanted(key, ignore_patterns, module_folders):
            continue
        if not _is_safe(key):
            logger.warning("fastload: %s: skipped %r: no file can have this name", root, key)
        elif size_bytes > MAX_FILE_BYTES:
            logger.warning(
                "fastload: %s: skipped %s: %s is too large for configuration (at most %s)",
                root,
                key,
                format_size(size_bytes),
                format_size(MAX_FILE_BYTES),
            )
        else:
            chosen[key] = item
    for key in _also_folders(chosen):
        logger.warning("fastload: %s: skipped %s: there is a folder of this name", root, key)
        del chosen[key]
    if len(chosen) > MAX_FILES:
        logger.warning(
            "fastload: %s holds %d small files, more than a model has; only those that are not "
            "in folders are taken. Is this the root of one model?",
            root,
            len(chosen),
        )
        chosen = {key: item for key, item in chosen.items() if "/" not in key}
    return list(chosen.values())


def module_folders(text: bytes) -> tuple[str, ...]:
    """Folders of the small dense layers that sentence-transformers keeps as files of their own.

    The engine reads those through the directory, not through its loader.
    """
    try:
        modules = json.loads(text)
        return tuple(
            str(module["path"]).strip("/")
            for module in modules
            if str(module["type"]).endswith(".Dense") and module["path"]
        )
    except (ValueError, TypeError, KeyError):
        return ()


def _wanted(key: str, ignore_patterns: Sequence[str], folders: Sequence[str]) -> bool:
    name = key.lower()
    if name.endswith(_OTHER_SUFFIXES) or _TRAINING_STATE.search(key):
        return False
    if matches_any(key, ignore_patterns):
        return False
    return not name.endswith(_WEIGHT_SUFFIXES) or key.rpartition("/")[0] in folders


def _is_safe(key: str) -> bool:
    """Whether the key is a relative path that stays below the directory, on any file system."""
    parts = key.split("/")
    return "\0" not in key and all(
        part not in ("", ".", "..") and len(part.encode()) <= 255 for part in parts
    )


def _also_folders(keys: Iterable[str]) -> list[str]:
    """Keys that are folders of other keys: S3 allows both, a file system does not."""
    names = set(keys)
    folders = set()
    for key in names:
        parts = key.split("/")
        folders |= {"/".join(parts[:end]) for end in range(1, len(parts))}
    return sorted(names & folders)
