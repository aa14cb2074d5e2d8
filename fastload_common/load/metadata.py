"""A model's small files, as a directory that the engine can read: never its weights.

The directory is named by its content, so the same model has the same path whatever bucket it
came from (engines put the path into their compile caches' keys), and a re-uploaded one has
another. For each weight file at the model's own level there is a file of the same name that
holds its header only: engines read names and types of tensors there, and tell which set of
weights a model has by the file names. No tensor can be read from such a file: the format's
reader refuses it.

Guarantees: whole or not there, safe when many processes start at once, bounded by
``cache_max_bytes``, kept while a process uses it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastload_common.checkpoint.records import Checkpoint
from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import ConfigError, ObjectMissingError
from fastload_common.load.all_at_once import all_at_once
from fastload_common.load.cache_root import cache_roots, private_directory, temporary_root
from fastload_common.load.content_store import ContentStore
from fastload_common.load.metadata_files import (
    MODULES,
    WEIGHT_SUFFIX,
    Listing,
    choose_metadata,
    list_or_guess,
    module_folders,
)
from fastload_common.load.model_root import open_model_root
from fastload_common.load.open_model import open_checkpoint
from fastload_common.ranges import ObjectId
from fastload_common.source.base import ObjectSource

__all__ = ["fetch_metadata", "require_configuration", "require_tokenizer"]

logger = logging.getLogger(__name__)

_THREADS = 16
_CONFIGURATIONS = ("config.json", "params.json")
_TOKENIZER_HINTS = (
    "token",
    "tekken",
    "vocab",
    "merges",
    "sentencepiece",
    "spiece",
    "bpe",
    "processor",
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def fetch_metadata(
    uri: str,
    settings: Settings,
    *,
    weights: bool = True,
    environ: Mapping[str, str] | None = None,
    open_root: Callable[[str, Settings], ObjectSource] | None = None,
    clock: Clock | None = None,
) -> Path:
    """Bring configuration, tokenizer and the like of a model to a local directory.

    Args:
        uri: the model's root.
        settings: ``cache_dir``, ``cache_max_bytes`` and ``ignore_patterns`` are used.
        weights: whether the root must hold weights; they are then checked (index, headers,
            sizes), so that what is wrong shows before an engine starts its workers. False for
            a tokenizer of its own.
        environ: variables to read instead of the process's (tests).
        open_root: opens the source (tests); None: as a load does, which may unpack it first.
        clock: times the wait for another process that writes the directory (tests).

    Returns:
        The directory; it stays until this process ends, and must not be written.

    Raises:
        CheckpointError: with `weights`: no weights, or damaged ones.
        SourceError: the store did not answer, or refuses.
        ConfigError: no directory can be written.
    """
    source = open_root(uri, settings) if open_root else open_model_root(uri, settings, clock=clock)
    try:
        listing = list_or_guess(source)
        name = _name_of(source.root, listing, settings, weights)
        fault: OSError | None = None
        for root in cache_roots(settings, environ):
            try:
                if root == temporary_root(environ):
                    root = _temporary(root)
                store = ContentStore(root / "metadata", settings.cache_max_bytes, clock)
                return _from_store(store, settings, source, listing, name, weights)
            except OSError as error:
                logger.warning("fastload: cannot keep metadata in %s: %s", root, error)
                fault = error
    finally:
        source.close()
    raise ConfigError(
        f"no directory for the model's configuration and tokenizer can be written: {fault}",
        hint="set FASTLOAD_CACHE_DIR to a writable directory, e.g. an emptyDir volume",
    )


def require_configuration(uri: str, directory: Path) -> None:
    """Check that a model's directory says what the model is.

    Without this, engines look for the file on a hub, or blame the directory.

    Raises:
        ObjectMissingError: neither of the usual files is there.
    """
    if not any((directory / name).is_file() for name in _CONFIGURATIONS):
        names = " nor ".join(_CONFIGURATIONS)
        raise ObjectMissingError(
            f"{uri} holds neither {names}",
            hint="upload the model's configuration beside its weights",
        )


def require_tokenizer(uri: str, directory: Path) -> None:
    """Check that there is something of a tokenizer, of whatever kind.

    Raises:
        ObjectMissingError: no file's name hints at one.
    """
    names = [path.name.lower() for path in directory.iterdir()]
    if not any(hint in name for name in names for hint in _TOKENIZER_HINTS):
        raise ObjectMissingError(
            f"{uri} holds no tokenizer (such as tokenizer.json or tokenizer.model)",
            hint="upload it beside the model, or name another place with --tokenizer",
        )


def _from_store(
    store: ContentStore,
    settings: Settings,
    source: ObjectSource,
    listing: Listing,
    name: str | None,
    weights: bool,
) -> Path:
    """Take the directory from the store, or fill it.

    Raises:
        OSError: the root cannot be written.
    """
    found = store.find(name) if name is not None else None
    if found is not None:
        logger.debug("fastload: metadata of %s is in %s already", source.root, found)
        return found
    files = _files(source, listing, settings, weights)
    try:
        return _fill(store, source, files, name)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        store.clear_unused()
        return _fill(store, source, files, name)


def _temporary(root: Path) -> Path:
    """The directory itself, or a fresh one where somebody else took the name."""
    try:
        private_directory(root)
    except PermissionError as error:
        logger.warning("fastload: %s", error)
        return Path(tempfile.mkdtemp(prefix=f"{root.name}-", dir=root.parent))
    return root


def _fill(
    store: ContentStore,
    source: ObjectSource,
    files: Mapping[str, bytes | ObjectId],
    name: str | None,
) -> Path:
    with store.draft() as draft:

        def write(item: tuple[str, bytes | ObjectId]) -> None:
            key, content = item
            # Written at once: all files of a model together may be large.
            data = content if isinstance(content, bytes) else source.read(content)
            draft.write(key, data)

        all_at_once(write, list(files.items()), threads=_THREADS)
        return store.publish(draft, name if name is not None else draft.digest())


def _files(
    source: ObjectSource, listing: Listing, settings: Settings, weights: bool
) -> dict[str, bytes | ObjectId]:
    """All files of the directory: their bytes, or which object holds them."""
    files: dict[str, bytes | ObjectId] = {}
    if weights:
        # The state that the name stands for, whatever has become of it since: reads are pinned.
        listed = listing.objects if listing.is_whole else None
        files |= _headers_only(open_checkpoint(source, settings, prefer="auto", listed=listed))
    by_key = {item.key: item for item in listing.objects}
    modules = by_key.get(MODULES)
    folders = module_folders(source.read(modules.object_id)) if modules is not None else ()
    chosen = choose_metadata(listing.objects, settings.ignore_patterns, folders, root=source.root)
    return files | {item.key: item.object_id for item in chosen}


def _headers_only(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Files that hold the headers of the checkpoint's files, and no tensor."""
    starts = {shard.object_id: shard for shard in checkpoint.shards}
    headers: dict[str, dict[str, Any]] = {shard.key: {} for shard in checkpoint.shards}
    for entry in checkpoint.entries.values():
        shard = starts[entry.object_id]
        span = entry.byte_range
        headers[shard.key][entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [span.start - shard.header_bytes, span.end - shard.header_bytes],
        }
    for key in checkpoint.ignored_keys:
        if key.endswith(WEIGHT_SUFFIX) and "/" not in key:
            headers[key] = {}
    return {key: _header_bytes(header) for key, header in headers.items()}


def _header_bytes(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text


def _name_of(root: str, listing: Listing, settings: Settings, weights: bool) -> str | None:
    """What this state of the root is called; None where states cannot be told apart."""
    if weights and not listing.is_whole:
        return None  # the weights are not among what was found by name
    rows = []
    for item in listing.objects:
        if not item.object_id.is_one_state:
            return None
        rows.append([item.key, item.object_id.etag, item.object_id.size_bytes])
    text = json.dumps([root, weights, settings.ignore_patterns, sorted(rows)])
    return hashlib.sha256(text.encode()).hexdigest()
