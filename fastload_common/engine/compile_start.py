"""One start of an engine with a compile cache: restore beside the weights, verify, publish.

Called by the one process of a node that starts the engine's workers:

1. `CompileStart.begin` before they are started: the key is made, the variables that they inherit
   lead to that key's directories, and restoring begins in a thread;
2. `wait` when the weights are there and before anything is compiled;
3. `complete` after warm-up, with the counters of all ranks.

Nothing here raises: without the cache the engine compiles.
"""

from __future__ import annotations

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
from fastload_common.engine.compile_verdict import SCHEMA, SCHEMA_VERSION, Verdict, judge
from fastload_common.errors import FastloadError
from fastload_common.load.report import append_line

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
        except FastloadError as error:
            logger.warning("fastload: compile cache: not used: %s", error)
            return None
        except Exception as error:  # noqa: BLE001 - a cache never ends a server
            # A foreign error's text may hold anything.
            logger.warning("fastload: compile cache: not used: %s", type(error).__name__)
            logger.debug("fastload: compile cache: not begun", exc_info=True)
            return None
        start = cls(engine, cache, directories, settings, clock)
        thread = threading.Thread(
            target=start._restore, args=(checked,), name="fastload-compile-restore", daemon=True
        )
        thread.start()
        return start

    @property
    def roots(self) -> dict[str, Path]:
        """All directories of a bundle: the engine's, and our own facts."""
        return {**self.directories.roots, _FACTS: self.directories.base / _FACTS}

    def wait(self) -> Outcome:
        """Wait until artefacts are in place, or known not to come."""
        begun_s = self._clock.monotonic_s()
        limit_s = self._settings.compile_cache_deadline_s + _UNPACK_S
        if not self._clock.wait(self._restored, limit_s):
            logger.warning("fastload: compile cache: restoring took longer than %.0f s", limit_s)
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
        try:
            self.outcome = self._cache.restore(factors, self.roots)
        finally:
            self._restored.set()

    def _complete(self, ranks: list[Counted], why: str) -> Verdict:
        total = sum_counted(ranks)
        facts = self.directories.base / _FACTS / _FACTS_FILE
        verdict = judge(self.outcome, total, len(ranks), _published_s(facts), why)
        self.verdict = verdict
        level = logging.WARNING if verdict.measured in ("unused", "partial") else logging.INFO
        logger.log(level, "fastload: compile cache: %s", verdict)
        # What was compiled although an entry was there is worth publishing only if it is new, and
        # nobody knows that the engine cannot use it.
        is_new = not why and bool(self.directories.names() - self._before)
        if verdict.measured in ("miss", "warm") or (verdict.compiled and is_new):
            if verdict.measured == "miss" or not facts.exists():
                facts.parent.mkdir(parents=True, exist_ok=True)
                facts.write_text(json.dumps({"compile_s": verdict.compile_s}))
            self._cache.publish(self.outcome, self.roots, replace=verdict.compiled > 0)
        if self._settings.report is not None:
            self._cache.then("writing the report", self._report)
        return verdict

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


def _published_s(facts: Path) -> float | None:
    try:
        value = json.loads(facts.read_text())["compile_s"]
        return float(value)
    except (OSError, ValueError, KeyError, TypeError):
        return None
