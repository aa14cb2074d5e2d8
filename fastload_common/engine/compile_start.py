"""One start of an engine with a compile cache: restore beside the weights, verify, publish.

Called by the one process of a node that starts the engine's workers:

1. `CompileStart.begin` before they are started: the key is made, the variables that they inherit
   lead to that key's directories, and restoring begins in a thread;
2. `wait` when the weights are there and before anything is compiled;
3. `complete` after warm-up, with the counters of all ranks.

Nothing here raises: without the cache the engine compiles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastload_common import __version__
from fastload_common.clock import Clock, SystemClock
from fastload_common.compile_cache.factors import check_factors
from fastload_common.compile_cache.key import key_of
from fastload_common.compile_cache.lifecycle import CompileCache, Outcome
from fastload_common.config import Settings, load_settings
from fastload_common.engine.cache_roots import CacheRoot
from fastload_common.engine.compile_counters import Counted, sum_counted
from fastload_common.engine.compile_directories import Directories, prepare_directories
from fastload_common.engine.compile_place import see
from fastload_common.engine.compile_verdict import SCHEMA, SCHEMA_VERSION, Verdict, judge
from fastload_common.engine.fork_guard import no_fork
from fastload_common.errors import FastloadError
from fastload_common.load.report import append_line
from fastload_common.source.early import import_for_s3

__all__ = ["CompileStart", "compile_cache_is_on"]

logger = logging.getLogger(__name__)

_FACTS = "fastload"
"""Root of the one file that fastload itself adds to a bundle."""
_FACTS_FILE = "start.json"
_UNPACK_S = 60.0
"""What a start waits longer than for S3: unpacking gigabytes to a slow disk."""


def compile_cache_is_on() -> bool:
    """Whether this process has been told to use one; False where its settings cannot be read."""
    try:
        return bool(load_settings().compile_cache)
    except FastloadError:
        return False


class CompileStart:
    """See the module. Made by `begin`.

    Attributes:
        directories: where artefacts are.
        outcome: what became of restoring; complete after `wait`.
        verdict: what the engine did; set by `complete`.
    """

    def __init__(
        self,
        engine: str,
        cache: CompileCache,
        directories: Directories,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self.directories = directories
        self.outcome = Outcome("failed", reason="restoring has not ended")
        self.verdict: Verdict | None = None
        self._engine = engine
        self._cache = cache
        self._settings = settings
        self._clock = clock
        self._restored = threading.Event()
        self._lock = threading.Lock()
        self._is_given_up = False
        self._before: set[tuple[str, str]] = set()
        self._waited_s = 0.0

    @classmethod
    def begin(
        cls,
        engine: str,
        factors: Callable[[], Mapping[str, Any]],
        layout: Sequence[CacheRoot],
        *,
        made_up: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> CompileStart | None:
        """Make the key, set variables and begin to restore; None where no cache is to be used.

        Args:
            engine: its name.
            factors: makes those of this start; an error of it is one warning.
            layout: directories of the engine.
            made_up: see `prepare_directories`.
        """
        try:
            settings = load_settings()
            clock = clock or SystemClock()
            cache = CompileCache.open(settings, clock)
            if cache is None:
                return None
            checked = check_factors(factors())
            directories = prepare_directories(layout, key_of(checked), settings, made_up=made_up)
            start = cls(engine, cache, directories, settings, clock)
            threading.Thread(
                target=start._restore, args=(checked,), name="fastload-compile-restore", daemon=True
            ).start()
            return start
        except FastloadError as error:
            logger.warning("fastload: compile cache: not used: %s", error)
            return None
        except Exception as error:  # noqa: BLE001 - a cache never ends a server
            # A foreign error's text may hold anything.
            logger.warning("fastload: compile cache: not used: %s", type(error).__name__)
            logger.debug("fastload: compile cache: not begun", exc_info=True)
            return None

    @property
    def roots(self) -> dict[str, Path]:
        """All directories of a bundle: the engine's, and our own facts."""
        return {**self.directories.roots, _FACTS: self.directories.base / _FACTS}

    def wait(self) -> Outcome:
        """Wait until artefacts are in place, or known not to come."""
        if not self.directories.place.is_mine:  # forked: the thread is the parent's
            return self.outcome
        begun_s = self._clock.monotonic_s()
        limit_s = self._settings.compile_cache_deadline_s + _UNPACK_S
        if not self._clock.wait(self._restored, limit_s):
            with self._lock:
                # What still comes is whole, but what became of it is not waited for any more.
                self._is_given_up = not self._restored.is_set()
        if self._is_given_up:
            self.outcome.notes.append(f"restoring took longer than {limit_s:.0f} s")
            logger.warning("fastload: compile cache: %s", self.outcome.notes[-1])
        self._waited_s = self._clock.monotonic_s() - begun_s
        self._before = self.directories.names()
        return self.outcome

    def complete(
        self, counted: Iterable[Counted], why: str = "", *, waited_s: float | None = None
    ) -> Verdict | None:
        """Say what was used, and publish what others lack; after warm-up.

        Args:
            counted: of each rank of this node.
            why: what is known of artefacts that could not be used.
            waited_s: seconds that ranks were held up, where others than the caller of `wait` were.
        """
        if waited_s is not None:
            self._waited_s = waited_s
        if not self.directories.place.is_mine:
            return None
        try:
            return self._complete(list(counted), why)
        except Exception as error:  # noqa: BLE001 - a cache never ends a server
            logger.warning("fastload: compile cache: not published: %s", type(error).__name__)
            logger.debug("fastload: compile cache: not completed", exc_info=True)
            return None

    def finish(self, limit_s: float | None = None) -> bool:
        """Wait for what runs in the background; True if all is done."""
        return self._cache.finish(limit_s)

    def _restore(self, factors: Mapping[str, Any]) -> None:
        outcome = self.outcome
        try:
            if self._cache.stores.remote is not None:
                with no_fork():  # workers may be forked at this very moment
                    import_for_s3()
            outcome = self._cache.restore(factors, self.roots)
        finally:
            with self._lock:
                if not self._is_given_up:
                    self.outcome = outcome
                self._restored.set()

    def _complete(self, ranks: list[Counted], why: str) -> Verdict:
        total = sum_counted(ranks)
        facts = self.directories.base / _FACTS / _FACTS_FILE
        verdict = judge(self.outcome, total, len(ranks), _published_s(facts), why)
        self.verdict = verdict
        level = logging.WARNING if verdict.measured in ("unused", "partial") else logging.INFO
        logger.log(level, "fastload: compile cache: %s", verdict)
        try:
            self._publish(verdict, facts, why)
        finally:
            if self._settings.report is not None:
                self._cache.then("writing the report", self._report)
        return verdict

    def _publish(self, verdict: Verdict, facts: Path, why: str) -> None:
        # What was compiled although an entry was there is worth publishing only if it is new, and
        # nobody knows that the engine cannot use it.
        is_new = not why and bool(self.directories.names() - self._before)
        is_wanted = verdict.measured in ("miss", "warm") or (verdict.compiled and is_new)
        if is_wanted and verdict.measured == "miss":  # a warm start's seconds say nothing
            _write_facts(facts, verdict)
        # The server goes on, and may compile more: what counts is what is there now.
        seen = see(self.roots.values())
        place = self.directories.place
        self._cache.then("noting what was compiled", lambda: place.seal(seen))
        if is_wanted:
            # An entry that was not put into place has a reason, and may be of use to others.
            replace = self.outcome.status == "hit" and verdict.compiled > 0
            self._cache.publish(self.outcome, self.roots, seen=seen, replace=replace)
        self._cache.then("letting others have the directory", place.finish)

    def _report(self) -> None:
        if self.verdict is None or self._settings.report is None:
            return
        found = {
            "kind": "compile_cache",
            "schema": SCHEMA_VERSION,
            "fastload_version": __version__,
            "engine": self._engine,
            "waited_s": round(self._waited_s, 3),
            **self.verdict.record(),
            **self.outcome.record(),
        }
        append_line(self._settings.report, json.dumps({name: found[name] for name in SCHEMA}))


def _write_facts(facts: Path, verdict: Verdict) -> None:
    try:
        facts.parent.mkdir(parents=True, exist_ok=True)
        facts.write_text(json.dumps({"compile_s": verdict.compile_s}))
    except OSError as error:  # then nobody will know how much was saved
        logger.debug("fastload: compile cache: no facts: %s", error)
        with contextlib.suppress(OSError):
            facts.unlink()


def _published_s(facts: Path) -> float | None:
    try:
        value = json.loads(facts.read_text())["compile_s"]
        return float(value)
    except (OSError, ValueError, KeyError, TypeError):
        return None
