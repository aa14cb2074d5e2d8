"""How the processes of one start tell each other about its compile cache: files in a directory.

For engines whose workers cannot be asked: the process that starts them says when artefacts are in
place, each worker says what it has compiled. Nobody waits for a process that may be gone without a
limit, and a full disk holds nobody up: what others wait for is that a file goes, not that it comes.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from fastload_common.clock import Clock, SystemClock
from fastload_common.engine.compile_counters import Counted

__all__ = ["RankReport", "StartBoard", "added"]

logger = logging.getLogger(__name__)

_PREFIX = "start-"
_RESTORING = "restoring"
_RANKS = "rank-*.json"
_OLD_S = 86_400.0
"""After which what a killed start left is removed."""
_POLL_S = 0.02
_COLLECT_S = 0.5
_LATE_S = 60.0
"""How much later than the first the last rank may say that it is warm."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank says.

    Attributes:
        is_warm: whether warm-up has ended; else its graphs are captured, and no more.
        waited_s: how long it was held up by restoring.
        counted: so far.
    """

    is_warm: bool
    waited_s: float
    counted: Counted


class StartBoard:
    """One start's directory.

    Args:
        path: it; see `create`.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock or SystemClock()

    @classmethod
    def create(cls, base: Path, clock: Clock | None = None) -> StartBoard:
        """A new one below `base`, in which artefacts are being restored.

        Raises:
            OSError: it cannot be written.
        """
        board = cls(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)), clock)
        (board.path / _RESTORING).touch()
        _sweep(board.path)
        return board

    def tell_restored(self) -> None:
        """Artefacts are in place, or will not come."""
        (self.path / _RESTORING).unlink(missing_ok=True)

    def wait_restored(self, limit_s: float) -> float:
        """Wait for that; returns the seconds that it took."""
        begun_s = self._clock.monotonic_s()
        never = threading.Event()
        while (self.path / _RESTORING).exists():
            waited_s = self._clock.monotonic_s() - begun_s
            if waited_s >= limit_s:
                logger.warning("fastload: compile cache: not restored after %.0f s", limit_s)
                return waited_s
            self._clock.wait(never, _POLL_S)
        return self._clock.monotonic_s() - begun_s

    def report(self, report: RankReport) -> None:
        """Say what this process has compiled; a later report replaces an earlier one.

        Raises:
            OSError: it cannot be written.
        """
        target = self.path / _RANKS.replace("*", str(os.getpid()))
        draft = target.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(report)))
        draft.replace(target)

    def reports(self) -> list[RankReport]:
        """Those that are there."""
        found = []
        for file in sorted(self.path.glob(_RANKS)):
            try:
                said = json.loads(file.read_text())
                found.append(RankReport(**{**said, "counted": Counted(**said["counted"])}))
            except (OSError, ValueError, TypeError, KeyError):
                logger.debug("fastload: compile cache: unreadable report %s", file, exc_info=True)
        return found

    def collect(self, ranks: int, stop: threading.Event) -> list[RankReport]:
        """Wait until so many ranks are warm, or too few for too long, or `stop` is set."""
        first_s: float | None = None
        while True:
            reports = self.reports()
            warm = sum(report.is_warm for report in reports)
            now_s = self._clock.monotonic_s()
            if warm >= ranks or stop.is_set():
                return reports
            if warm and first_s is None:
                first_s = now_s
            if first_s is not None and now_s - first_s >= _LATE_S:
                return reports
            self._clock.wait(stop, _COLLECT_S)

    def remove(self) -> None:
        """Nobody needs it any more."""
        _remove(self.path)


def added(
    before: Iterable[tuple[str, str]], after: Iterable[tuple[str, str]], counted: Iterable[str]
) -> dict[str, int]:
    """How many artefacts came into directories whose compilers count nothing themselves.

    Args:
        before, after: root and name of each file.
        counted: roots of those that do count.

    Returns:
        Root -> directories with new files: compilers give each artefact one.
    """
    known, others = set(before), set(counted)
    places = {(root, os.path.dirname(name)) for root, name in set(after) - known}
    found: dict[str, int] = {}
    for root, _ in sorted(places):
        if root not in others:
            found[root] = found.get(root, 0) + 1
    return found


def _sweep(young: Path) -> None:
    """Remove what killed starts left beside a new one."""
    now_s = young.stat().st_mtime  # by the clock of this file system
    for path in young.parent.glob(f"{_PREFIX}*"):
        try:
            if now_s - path.stat().st_mtime > _OLD_S:
                _remove(path)
        except OSError:
            continue


def _remove(path: Path) -> None:
    try:
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()
    except OSError as error:
        logger.debug("fastload: compile cache: %s stays: %s", path, error)
