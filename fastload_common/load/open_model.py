"""Open a checkpoint: list, index, all headers at once. Reads no tensor.

Requests for a model of n shards: one listing (or more pages), one for the index, and one or two
for each shard, all shards at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastload_common.checkpoint.assemble import Duplicate, ShardHeader, assemble, conflict
from fastload_common.checkpoint.header import NeedMore, parse_header
from fastload_common.checkpoint.index import CheckpointIndex, parse_index
from fastload_common.checkpoint.layout import (
    choose_files,
    choose_index,
    missing_shards,
    usual_names,
)
from fastload_common.checkpoint.nothing_found import no_weights
from fastload_common.checkpoint.records import Checkpoint, TensorEntry
from fastload_common.checkpoint.wording import enumerate_some
from fastload_common.config import Settings
from fastload_common.errors import (
    AccessDeniedError,
    CheckpointError,
    NoWeightsError,
    ObjectMissingError,
    RangeMismatchError,
    ShardMissingError,
    SourceError,
)
from fastload_common.load.all_at_once import all_at_once
from fastload_common.load.listing import list_root, only_listing_is_denied
from fastload_common.load.phases import NoPhases, PhaseTimer
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, ObjectSource
from fastload_common.source.registry import layout_hint
from fastload_common.source.uri import is_file_uri
from fastload_common.units import KIB, MIB

__all__ = ["open_checkpoint"]

_FIRST_READ_BYTES = 128 * KIB
"""Holds the header of some 1,000 tensors; costs little more time than a smaller request."""

_ENTRY_BYTES = 110
"""Of a header's entry besides the tensor's name, rounded up."""

_MAX_GUESS_BYTES = 16 * MIB
_MAX_INDEX_BYTES = 256 * MIB
_COMPARE_BYTES = 8 * MIB

_log = logging.getLogger(__name__)


def open_checkpoint(
    source: ObjectSource,
    settings: Settings,
    *,
    prefer: str = "hf",
    patterns: Sequence[str] | None = None,
    select: Callable[[str], bool] | None = None,
    listed: Sequence[ListedObject] | None = None,
    threads: int = 16,
    phases: PhaseTimer | None = None,
    see_start: Callable[[ObjectId, bytes], None] | None = None,
) -> Checkpoint:
    """Find out which tensor lies where.

    Args:
        source: the model's folder; stays the caller's.
        settings: ``ignore_patterns`` is used.
        prefer: ``hf``, ``mistral`` or ``auto``: which set of weights, if there are two.
        patterns: an engine's own globs of weight files; they replace the index's choice of files.
        select: a further condition on keys.
        listed: what stands below the root, folders included, where the caller has listed it: the
            checkpoint is then of that state. Else it is listed here.
        threads: shards whose headers are read at the same time.
        phases: told of the phases ``list`` and ``headers``.
        see_start: told the index and the headers as they were read; called from any thread.

    Raises:
        NoWeightsError: nothing that can be loaded.
        ShardMissingError: files of the index, or of the numbering, are not there.
        CheckpointError: the index or a header is wrong, or two copies of a tensor differ. Where
            several shards are wrong, one error names all of them.
        SourceError: the store did not answer.
    """
    phases = phases or NoPhases()
    with phases.phase("list"):
        find = _Finder(source, settings, prefer, patterns, select, threads, see_start).find
        found = find(listed)
    _tell_ignored(source.root, found.ignored)
    with phases.phase("headers"):
        guesses = _guess_header_bytes(found.index)
        shards = all_at_once(
            lambda item: _read_header(source, *item, guesses.get(item[0], 0), see_start),
            list(found.files.items()),
            threads=threads,
        )
        checkpoint, duplicates = assemble(
            source.root, shards, index=found.index, ignored_keys=found.ignored
        )
        all_at_once(lambda pair: _compare(source, pair), duplicates, threads=threads)
    return checkpoint


def _tell_ignored(root: str, keys: Sequence[str]) -> None:
    if keys:
        _log.info(
            "%s: %d weight files are not part of the model and not read: %s",
            root,
            len(keys),
            enumerate_some(keys, limit=20),
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """The chosen files with their state, in the order of loading."""

    files: dict[str, ObjectId]
    index: CheckpointIndex | None
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the files of a model: by listing, or where that is not allowed by name."""

    source: ObjectSource
    settings: Settings
    prefer: str
    patterns: Sequence[str] | None
    select: Callable[[str], bool] | None
    threads: int
    see_start: Callable[[ObjectId, bytes], None] | None

    def find(self, listed: Sequence[ListedObject] | None) -> _Found:
        # Folders below a model can hold many objects (old checkpoints): not listed unless asked.
        recursive = any("/" in pattern or "**" in pattern for pattern in self.patterns or ())
        if listed is not None:
            level = {x.key: x.object_id for x in listed if recursive or "/" not in x.key}
            return self._find_listed(level, [x.key for x in listed])
        try:
            listed = list_root(self.source, recursive=recursive)
        except AccessDeniedError as denied:
            if not only_listing_is_denied(denied):
                raise
            return self._find_by_name(denied)
        return self._find_listed({item.key: item.object_id for item in listed}, None)

    def _find_listed(self, listed: dict[str, ObjectId], below: Sequence[str] | None) -> _Found:
        root = self.source.root
        try:
            index_key = choose_index(listed, root=root, prefer=self.prefer, patterns=self.patterns)
            index = self._read_index(index_key, listed[index_key]) if index_key else None
            choice = choose_files(
                listed,
                root=root,
                index=index,
                prefer=self.prefer,
                patterns=self.patterns,
                ignore_patterns=self.settings.ignore_patterns,
                select=self.select,
            )
        except (NoWeightsError, ShardMissingError) as error:
            raise self._explained(error, () if listed else below) from None
        files = {key: listed[key] for key in choice.files if key in listed}
        files |= self._stat_files([key for key in choice.files if key not in listed], index)
        return _Found({key: files[key] for key in choice.files}, index, choice.ignored)

    def _find_by_name(self, denied: AccessDeniedError) -> _Found:
        """Go on without a listing: the index names the files, or there is one with a usual name."""
        if self.patterns is not None:
            raise denied
        index_keys, weight_keys = usual_names(self.prefer)
        for key in index_keys:
            object_id = self._stat_or_none(key)
            if object_id is not None:
                index = self._read_index(key, object_id)
                return self._found_by_name(self._stat_files(index.files, index), index)
        for key in weight_keys:
            object_id = self._stat_or_none(key)
            if object_id is not None:
                return self._found_by_name({key: object_id}, None)
        denied.add_note(f"Without a listing, {', '.join(index_keys + weight_keys)} were tried.")
        raise denied

    def _found_by_name(self, files: dict[str, ObjectId], index: CheckpointIndex | None) -> _Found:
        choice = choose_files(
            files,
            root=self.source.root,
            index=index,
            prefer=self.prefer,
            ignore_patterns=self.settings.ignore_patterns,
            select=self.select,
        )
        return _Found({key: files[key] for key in choice.files}, index, ())

    def _stat_or_none(self, key: str) -> ObjectId | None:
        try:
            return self.source.stat(key)
        except (ObjectMissingError, AccessDeniedError):
            # Who may not list is told 403 for a missing key as well.
            return None

    def _stat_files(
        self, keys: Sequence[str], index: CheckpointIndex | None
    ) -> dict[str, ObjectId]:
        """Stat files of the index; all that are missing are named at once."""

        def look(key: str) -> ObjectId | SourceError:
            try:
                return self.source.stat(key)
            except (ObjectMissingError, AccessDeniedError) as error:
                return error

        outcomes = dict(zip(keys, all_at_once(look, keys, threads=self.threads), strict=True))
        failed = {key: e for key, e in outcomes.items() if isinstance(e, SourceError)}
        if failed and index is not None:
            counts = index.tensor_counts()
            error = missing_shards(
                self.source.root, index.key, {key: counts[key] for key in failed}
            )
            if any(isinstance(e, AccessDeniedError) for e in failed.values()):
                error.add_note(
                    "The store answered 'access denied' for some. It does so for absent objects "
                    "too while listing is not allowed; allow listing to tell the two apart."
                )
            raise error from next(iter(failed.values()))
        return {key: o for key, o in outcomes.items() if isinstance(o, ObjectId)}

    def _read_index(self, key: str, object_id: ObjectId) -> CheckpointIndex:
        if object_id.size_bytes > _MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{object_id.uri} is too large for an index: {object_id.size_bytes} bytes",
                hint="upload the model's own index file",
                limit_bytes=_MAX_INDEX_BYTES,
            )
        text = self.source.read(object_id) if object_id.size_bytes else b""
        if self.see_start is not None:
            self.see_start(object_id, text)
        return parse_index(text, key=key, root=self.source.root)

    def _explained(self, error: CheckpointError, below: Sequence[str] | None) -> CheckpointError:
        """Add what is known of an odd layout, or of folders where nothing else stands.

        Args:
            below: keys in folders; None: not known, so they are listed.
        """
        hint = layout_hint(self.source) or _hub_cache_hint(self.source)
        if not hint:
            if below is None:
                below = _keys_or_none(self.source)
            root = self.source.root
            return no_weights(root, below, prefer=self.prefer) if below else error
        return type(error)(error.what, hint=f"{hint}; {error.hint}", **error.fields)


def _keys_or_none(source: ObjectSource) -> list[str]:
    try:
        return [item.key for item in source.list(recursive=True)]
    except SourceError:
        return []


def _hub_cache_hint(source: ObjectSource) -> str:
    """The same for a hub cache that was copied into a store: ``refs/main`` holds the revision."""
    try:
        revision = source.read(source.stat("refs/main"), ByteRange(0, 40)).decode("ascii")
    except (SourceError, ValueError):
        return ""
    return f"this is the root of a hub cache; use {source.root}/snapshots/{revision}"


def _guess_header_bytes(index: CheckpointIndex | None) -> dict[str, int]:
    """How long each file's header will be, from the tensors that the index expects in it."""
    guesses: dict[str, int] = {}
    for name, file in (index.weight_map if index else {}).items():
        guesses[file] = guesses.get(file, 0) + len(name.encode(errors="replace")) + _ENTRY_BYTES
    return guesses


def _read_header(
    source: ObjectSource,
    key: str,
    object_id: ObjectId,
    guess_bytes: int,
    see_start: Callable[[ObjectId, bytes], None] | None,
) -> ShardHeader:
    """Read and parse one header with at most two requests."""
    wanted_bytes = max(_FIRST_READ_BYTES, min(guess_bytes, _MAX_GUESS_BYTES))
    prefix = _read(source, object_id, 0, min(wanted_bytes, object_id.size_bytes))
    header = parse_header(prefix, object_id)
    if isinstance(header, NeedMore):
        prefix += _read(source, object_id, len(prefix), header.prefix_bytes)
        header = parse_header(prefix, object_id)
    if isinstance(header, NeedMore):
        raise AssertionError("a header's length is known from its first eight bytes")
    if see_start is not None:
        see_start(object_id, prefix[: header.header_bytes])
    return ShardHeader(key, object_id, header)


def _read(source: ObjectSource, object_id: ObjectId, start: int, end: int) -> bytes:
    """Read a range and trust no source blindly. No request for an empty range."""
    if start == end:
        return b""
    data = source.read(object_id, ByteRange(start, end))
    if len(data) != end - start:
        raise RangeMismatchError(
            f"asked {object_id.uri} for bytes [{start}, {end}), got {len(data)} bytes",
            hint="the store does not honour ranges",
        )
    return data


def _compare(source: ObjectSource, pair: Duplicate) -> None:
    """Raise unless both copies hold the same bytes."""
    kept, other = pair.kept, pair.other
    if _same_file(kept, other):
        return
    size_bytes = kept.byte_range.size_bytes
    for begin in range(0, size_bytes, _COMPARE_BYTES):
        end = min(begin + _COMPARE_BYTES, size_bytes)
        pieces = [
            _read(source, e.object_id, e.byte_range.start + begin, e.byte_range.start + end)
            for e in (kept, other)
        ]
        if pieces[0] != pieces[1]:
            raise conflict(kept, other)


def _same_file(kept: TensorEntry, other: TensorEntry) -> bool:
    """Whether both are one place of one file under two names (links); its token has the inode."""
    ids = (kept.object_id, other.object_id)
    return (
        kept.byte_range == other.byte_range
        and all(is_file_uri(i.uri) and i.etag is not None for i in ids)
        and (ids[0].etag, ids[0].size_bytes) == (ids[1].etag, ids[1].size_bytes)
    )
