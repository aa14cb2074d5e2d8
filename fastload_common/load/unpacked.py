"""Artifacts that had to be unpacked before they can be read: once for a node, whole or not there.

Layout in the directory that `unpacked_root` gives::

    <digest>/lock              held shared by whoever reads there, exclusively by who fills it
    <digest>/tree/             what the layers hold
    <digest>/complete.json     written last; without it nothing in the tree is believed
    <digest>/pulled            what the tree held when it was pulled, until that is complete.json
    <digest>/.fastload-pull-*  what is not verified yet; a pull that was ended goes on from there
    *.gone, .lock              being removed; held for a moment by who renames one to that

The name is the digest of the manifest, so that it says platform and content. A process holds its
lock until it ends, and the kernel releases it whatever ends the process. Directories that nobody
holds are removed, the least recently used first, where the disk has no room for another one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import ArchiveUnsafeError, DeadlineError, PullError
from fastload_common.load.cache_root import private_directory, temporary_root
from fastload_common.load.progress import Progress, make_progress
from fastload_common.load.unpacked_note import read_note, write_note
from fastload_common.load.unpacked_root import explained
from fastload_common.load.unpacked_tree import (
    allocated_bytes,
    confine_links,
    contents_of,
    force_to_disk,
    remove_tree,
)
from fastload_common.pull.pull import pull
from fastload_common.pull.records import PullPlan
from fastload_common.units import format_size

__all__ = ["Unpacked", "UnpackedArtifact"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_SAY_S = 10.0
_FREE_SHARE = 0.15
"""Of the disk, that is to stay free: the node cache leaves as much."""
_NAME = re.compile(r"sha(256-[0-9a-f]{64}|512-[0-9a-f]{128})(-[0-9a-f]{8}\.gone)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)

_held: dict[Path, int] = {}
"""Directory -> descriptor that holds its shared lock; kept open for the life of the process."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An artifact that is there, whole, until this process ends.

    Attributes:
        tree: its files.
        facts: for the report; see `report_fields`.
    """

    tree: Path
    facts: dict[str, Any] = field(default_factory=dict)


class UnpackedArtifact:
    """One artifact's directory.

    Args:
        root: as `unpacked_root` gives it.
        uri: the artifact by its manifest's digest, without a folder.
        settings: of the pull.
        clock: for waits and the deadline.
    """

    def __init__(self, root: Path, uri: str, settings: Settings, clock: Clock) -> None:
        self._root = root
        self._uri = uri
        self._settings = settings
        self._clock = clock
        self.directory = root / uri.rpartition("@")[2].replace(":", "-")
        self._tree = self.directory / "tree"
        self._complete = self.directory / "complete.json"
        self._pulled = self.directory / "pulled"

    def find(self) -> Unpacked | None:
        """What is there already, now held by this process; None: it is not, or not whole.

        Raises:
            PullError: the directory cannot be used, or is somebody else's.
        """
        with explained(self.directory):
            return self._find()

    def _find(self) -> Unpacked | None:
        if not self.directory.is_dir():
            return None
        descriptor = self._opened()
        if descriptor is not None:
            with contextlib.ExitStack() as ending:
                ending.callback(os.close, descriptor)
                if _try_lock(descriptor, fcntl.LOCK_SH) and self._is_current(descriptor):
                    facts = self._facts()
                    if facts is not None:
                        self._hold(descriptor)
                        ending.pop_all()
                        return Unpacked(self._tree, facts | {"state": "found"})
        return None

    def get(
        self, *, started_s: float, progress: bool = True, check: Callable[[], None] = lambda: None
    ) -> Unpacked:
        """What is there, or pull it; where another process does, wait for that one.

        Args:
            started_s: the clock's reading when the load began; its deadline counts from it.
            progress: whether this process may show a progress display.
            check: called while waiting; what it raises ends the wait.

        Raises:
            DeadlineError: the load as a whole took too long.
            ConfigError: the directory belongs to somebody else.
            PullError: no room, or what the layers hold cannot be unpacked.
            SourceError: a layer could not be read, or is not what its digest says.
        """
        begun_s = said_s = self._clock.monotonic_s()
        how = "found"
        while True:
            check()
            left_s = self._left_s(started_s)
            found = self.find()
            if found is not None:
                wait_s = round(self._clock.monotonic_s() - begun_s, 6)
                return Unpacked(found.tree, found.facts | {"state": how, "wait_s": wait_s})
            with explained(self.directory):
                outcome = self._pull_if_free(left_s, progress)
            if outcome:
                how = outcome
                continue
            how = "waited"
            now_s = self._clock.monotonic_s()
            if now_s - said_s >= _SAY_S:
                said_s = now_s
                logger.info("fastload: waits for another process that unpacks %s", self._uri)
            self._clock.wait(threading.Event(), _POLL_S)

    def _left_s(self, started_s: float) -> float | None:
        limit_s = self._settings.deadline_s
        if limit_s is None:
            return None
        left_s = started_s + limit_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise DeadlineError(
                f"{self._uri} was not unpacked within {limit_s:g} s",
                hint="raise FASTLOAD_DEADLINE_S; what has come is kept for the next start",
            )
        return left_s

    def _pull_if_free(self, left_s: float | None, progress: bool) -> str:
        """How it has become complete; empty: another process is at work."""
        private_directory(self.directory)
        descriptor = self._opened()
        if descriptor is None:
            return ""
        try:
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                self._set_aside_if_broken(descriptor)
                return ""
            if not self._is_current(descriptor):
                return ""
            if self._facts() is not None:
                return "waited"  # for the one that was at work a moment ago
            self._fill(left_s, progress)
            return "pulled"
        finally:
            os.close(descriptor)

    def _set_aside_if_broken(self, descriptor: int) -> None:
        """Somebody has removed a part of what others hold: they would be waited for in vain."""
        # Whoever is unpacking holds it exclusively, and has a stage while nothing is complete.
        if not _try_lock(descriptor, fcntl.LOCK_SH) or any(self.directory.glob(".fastload-*")):
            return
        if self._facts() is None:
            self._remove(descriptor)

    def _fill(self, left_s: float | None, progress: bool) -> None:
        started_s = self._clock.monotonic_s()
        self._complete.unlink(missing_ok=True)
        # Without that note nobody knows whether all of a tree is there, or has been on the disk
        # when the machine went down.
        report = read_note(self._pulled)
        if report is None or not self._holds(report):
            remove_tree(self._tree)
            report = self._pull(left_s, progress)
            confine_links(self._tree)
            report |= contents_of(self._tree)
            write_note(self._pulled, report)
        force_to_disk(self.directory)
        wall_s = round(self._clock.monotonic_s() - started_s, 6)
        facts = report | {"pull_s": wall_s}
        temporary = self._complete.with_suffix(".new")
        with open(temporary, "w", encoding="ascii") as stream:
            json.dump({"uri": self._uri, "facts": facts}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self._complete)
        self._pulled.unlink(missing_ok=True)
        logger.info(
            "fastload: unpacked %s: %s fetched, %d files and directories with %s, in %.2f s",
            self._uri,
            format_size(report["fetched_bytes"]),
            facts["entries"],
            format_size(facts["tree_bytes"]),
            wall_s,
        )

    def _pull(self, left_s: float | None, progress: bool) -> dict[str, Any]:
        shown: list[Progress] = []

        def begin(plan: PullPlan) -> None:
            self._make_room(plan)
            mode = self._settings.progress if progress else "off"
            shown.append(make_progress(mode, plan.size_bytes, clock=self._clock))

        try:
            report = pull(
                self._uri,
                self._tree,
                replace(self._settings, deadline_s=left_s),
                slots_directory=temporary_root() / "pull",
                clock=self._clock,
                begin=begin,
                advance=lambda size_bytes: shown[0].advance(size_bytes),
            )
        except ArchiveUnsafeError as error:
            # Of the command, which a load has not.
            if "--special" not in error.hint:
                raise
            hint = f"fastload pull {self._uri} DIRECTORY --special drop, and load from there"
            raise ArchiveUnsafeError(error.what, hint=hint, **error.fields) from error
        except PullError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                # A node whose disk is full is worse off than one that fetches again.
                self._remove()
            raise
        finally:
            for one in shown:
                one.close()
        return {
            "layers": report.layers,
            "files": report.files,
            "size_bytes": report.size_bytes,
            "fetched_bytes": report.fetched_bytes,
            "resumed_bytes": report.resumed_bytes,
            "unpacked_bytes": report.unpacked_bytes,
        }

    def _make_room(self, plan: PullPlan) -> None:
        """Say what will be pulled, and remove what nobody uses where the disk is too full for it.

        Raises:
            PullError: it has no room all the same.
        """
        # Stored and unpacked bytes are there together at worst, and weights hardly shrink.
        present_bytes = sum(map(allocated_bytes, self.directory.glob(".fastload-*")))
        wanted_bytes = max(0, 2 * plan.size_bytes - present_bytes)
        others = self._least_recently_used()
        free_bytes, disk_bytes = _disk(self._root)
        while free_bytes < wanted_bytes + _FREE_SHARE * disk_bytes:
            other = next(others, None)
            if other is None:
                break
            logger.info("fastload: removed %s, which nobody uses, to make room", other)
            free_bytes, _ = _disk(self._root)
        logger.info(
            "fastload: %s has compressed layers: %s are pulled and unpacked in %s (%s free, %s of "
            "it there)",
            self._uri,
            format_size(plan.size_bytes),
            self.directory,
            format_size(free_bytes),
            format_size(present_bytes),
        )
        missing_bytes = plan.size_bytes - present_bytes
        if free_bytes < missing_bytes:
            raise PullError(
                f"{self._uri} must be unpacked to be read: {format_size(missing_bytes)} are to be "
                f"fetched, and the disk of {self.directory} has {format_size(free_bytes)} free",
                hint="set FASTLOAD_CACHE_DIR to a directory on a disk with twice as much room",
            )

    def _least_recently_used(self) -> Iterator[Path]:
        """Remove what nobody holds, one after the other; yields what was removed."""
        known: list[tuple[float, Path]] = []
        for path in self._root.iterdir():
            with contextlib.suppress(OSError):
                if not _NAME.fullmatch(path.name):
                    continue  # not ours
                if path.name.endswith(".gone"):
                    remove_tree(path)  # its remover was ended
                elif path.is_dir() and path != self.directory and path not in _held:
                    known.append((path.stat().st_mtime, path))
        for _, path in sorted(known):
            other = UnpackedArtifact(self._root, f"@{path.name}", self._settings, self._clock)
            with contextlib.suppress(OSError):
                descriptor = other._opened()
                if descriptor is None:
                    continue
                try:
                    if _try_lock(descriptor, fcntl.LOCK_EX) and other._is_current(descriptor):
                        other._remove()
                        yield path
                finally:
                    os.close(descriptor)

    def _remove(self, descriptor: int | None = None) -> None:
        """Out of sight at once, then deleted.

        Args:
            descriptor: its lock, where that is held shared: others may remove it, too.
        """
        gone = self.directory.with_name(f"{self.directory.name}-{secrets.token_hex(4)}.gone")
        with open(self._root / ".lock", "ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if descriptor is not None and not self._is_current(descriptor):
                return
            os.rename(self.directory, gone)
        remove_tree(gone)

    def _facts(self) -> dict[str, Any] | None:
        """What was noted at the end; None: not complete, or somebody has removed a part."""
        try:
            facts = json.loads(self._complete.read_text(encoding="ascii"))["facts"]
            if not self._holds(facts):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return {"directory": str(self._tree), **facts}

    def _holds(self, facts: Mapping[str, Any]) -> bool:
        """Whether the tree holds as much as was noted."""
        if not self._tree.is_dir():
            return False
        found = contents_of(self._tree)
        return {name: facts.get(name) for name in found} == found

    def _opened(self) -> int | None:
        """The lock's descriptor; None: the directory has gone."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            status = self.directory.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PermissionError(f"{self.directory} is not a directory of this user alone")
            return os.open(self.directory / "lock", flags, 0o600)
        except FileNotFoundError:
            return None

    def _is_current(self, descriptor: int) -> bool:
        """Whether the lock is still that of the directory of this name."""
        try:
            return os.path.samestat(os.fstat(descriptor), (self.directory / "lock").lstat())
        except OSError:
            return False

    def _hold(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.directory)
        before = _held.get(self.directory)
        _held[self.directory] = descriptor
        if before is not None:
            os.close(before)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _disk(directory: Path) -> tuple[int, int]:
    """Bytes that are free, and bytes of all."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
