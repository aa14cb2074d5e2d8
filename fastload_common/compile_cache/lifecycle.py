"""What an engine's adapter calls: restore before the engine looks, publish after warm-up.

The key is made once, by `CompileCache.restore`, and kept in the `Outcome`: publishing uses the same
one, however the engine has changed its configuration meanwhile. Neither call raises: without the
cache the engine compiles.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from fastload_common.clock import Clock, SystemClock
from fastload_common.compile_cache.background import Background
from fastload_common.compile_cache.bundle import Packing, misfit, pack
from fastload_common.compile_cache.factors import Factors, check_factors
from fastload_common.compile_cache.key import key_of
from fastload_common.compile_cache.manifest import LIMITS, encode_manifest
from fastload_common.compile_cache.opening import open_stores
from fastload_common.compile_cache.stores.base import Entry, Package
from fastload_common.compile_cache.stores.tiered import TieredStore
from fastload_common.compile_cache.trust import Keys, load_keys
from fastload_common.compile_cache.unpack import unpack
from fastload_common.config import Settings
from fastload_common.errors import BundleInvalidError, FastloadError
from fastload_common.units import MIB, format_size

__all__ = ["CompileCache", "Outcome"]

logger = logging.getLogger(__name__)

_IN_MEMORY_BYTES = 256 * MIB


@dataclass
class Outcome:
    """What became of one start; goes into the report.

    Attributes:
        status: ``hit``: artefacts were put into place (whether the engine uses them is for its
            own counters to say); ``miss``; ``failed``: no key, or no store that could be used.
        key: of the factors, as they were at `restore`; empty without one.
        store: where the entry came from.
        reason: why it is no hit.
        nearest_key, differing: on a miss, the entry that differs least, and in what. Set by the
            background thread; see `CompileCache.finish`.
        files, content_bytes: what was put into place.
        restore_s: seconds that the start was held up.
        published: store -> ``stored``, or why not. Empty: not tried.
        publish_s: seconds in the background.
        notes: what went wrong, one sentence each.
    """

    status: str
    key: str = ""
    store: str = ""
    reason: str = ""
    nearest_key: str = ""
    differing: list[str] = field(default_factory=list)
    files: int = 0
    content_bytes: int = 0
    restore_s: float = 0.0
    published: dict[str, str] = field(default_factory=dict)
    publish_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    factors: Factors = field(default_factory=dict, repr=False)

    def record(self) -> dict[str, Any]:
        """For the report: all but the factors, which `fastload cache show` has."""
        found = asdict(self)
        del found["factors"]
        return found


class CompileCache:
    """The cache of one process; see `open`.

    Args:
        stores: where entries are.
        settings: bounds and deadline.
        keys: sign and verify.
    """

    def __init__(
        self, stores: TieredStore, settings: Settings, keys: Keys | None, clock: Clock
    ) -> None:
        self.stores = stores
        self._keys = keys
        self._clock = clock
        # What no start may unpack is not published either.
        self._limits = with_changes(LIMITS, content_bytes=settings.compile_cache_max_bytes)
        self._background = Background(clock, settings.compile_cache_deadline_s)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, settings: Settings, clock: Clock | None = None) -> CompileCache | None:
        """The cache that the settings ask for; None where they ask for none.

        Raises:
            ConfigError: a setting that cannot be meant, or a package that is not installed.
        """
        if not settings.compile_cache:
            return None
        clock = clock or SystemClock()
        keys = load_keys(settings.compile_cache_signing_key_file)
        return cls(open_stores(settings, keys, clock), settings, keys, clock)

    def restore(
        self,
        factors: Mapping[str, Any],
        roots: Mapping[str, Path],
        places: Mapping[str, Path] | None = None,
    ) -> Outcome:
        """Put the artefacts of these factors into the engine's directories, if there are any.

        Args:
            factors: see `check_factors`.
            roots: name -> directory that the engine will look into.
            places: further paths that artefacts may name; see `Packing`.
        """
        begun_s = self._clock.monotonic_s()
        try:
            outcome = Outcome("miss", key_of(factors), factors=check_factors(factors))
        except FastloadError as error:
            logger.warning("fastload: compile cache: not used: %s", error)
            return Outcome("failed", reason=str(error), notes=[str(error)])
        try:
            self._restore(outcome, roots, {**(places or {}), **roots})
        except Exception as error:  # noqa: BLE001 - a cache never ends a server
            logger.warning("fastload: compile cache: not used: %s", type(error).__name__)
            logger.debug("fastload: compile cache: restoring failed", exc_info=True)
            outcome.status, outcome.reason = "failed", type(error).__name__
        outcome.restore_s = self._clock.monotonic_s() - begun_s
        outcome.notes = list(self.stores.notes)
        if outcome.status == "hit":
            logger.info(
                "fastload: compile cache: hit %s in %s: %d files, %s in %.2f s",
                outcome.key[:12],
                outcome.store,
                outcome.files,
                format_size(outcome.content_bytes),
                outcome.restore_s,
            )
        else:
            self._background.submit("looking for the nearest entry", lambda: self._explain(outcome))
        return outcome

    def publish(
        self,
        outcome: Outcome,
        roots: Mapping[str, Path],
        *,
        places: Mapping[str, Path] | None = None,
        harmless: Sequence[re.Pattern[bytes]] = (),
        seen: Mapping[str, tuple[int, int]] | None = None,
        replace: bool = False,
    ) -> None:
        """Store what the engine has compiled, in the background.

        Call it after warm-up, from one process of the node, when nothing is written any more.

        Args:
            outcome: of `restore`; its key is used, and ``published`` is set in it.
            roots: as for `restore`.
            places, harmless, seen: see `Packing`.
            replace: the entry is there and the engine could not use it.
        """
        if not outcome.key or (outcome.status == "hit" and not replace):
            return
        if self._keys is not None and not self._keys.may_sign:
            outcome.published = dict.fromkeys(self._names(), "there is only the public key")
            return
        how = Packing(places or {}, harmless, seen=seen, limits=self._limits)
        fixed = dict(roots)
        self._background.submit(
            "publishing to the compile cache",
            lambda: self._publish(outcome, fixed, how, replace=replace),
        )

    def then(self, name: str, job: Callable[[], None]) -> None:
        """Do something in the background, after what is to be done there.

        Args:
            name: a noun for the message if it fails.
        """
        self._background.submit(name, job)

    def finish(self, limit_s: float | None = None) -> bool:
        """Wait for what runs in the background, at most the deadline; True if all is done."""
        return self._background.finish(limit_s)

    def close(self, limit_s: float | None = None) -> bool:
        """`finish` for good."""
        return self._background.close(limit_s)

    def _restore(
        self, outcome: Outcome, roots: Mapping[str, Path], places: Mapping[str, Path]
    ) -> None:
        reasons = []
        for entry in self.stores.candidates(outcome.key):
            reason = misfit(entry.manifest, places)
            try:
                if reason is None:
                    unpack(entry.manifest, entry.blob, roots)
            except BundleInvalidError as error:
                self.stores.reject(entry.store, outcome.key, error)
                reason = f"its entry in {entry.store} is damaged"
            except OSError as error:
                logger.warning("fastload: compile cache: cannot unpack: %s", error)
                reason = f"cannot unpack: {error.strerror or type(error).__name__}"
            except BaseException:
                entry.blob.close()
                raise
            if reason is not None:
                entry.blob.close()
                reasons.append(reason)
                continue
            outcome.status, outcome.store = "hit", entry.store
            outcome.files = len(entry.manifest.files)
            outcome.content_bytes = entry.manifest.content_bytes
            self._background.submit("keeping an entry", partial(self._keep, entry))
            return
        outcome.reason = "; ".join(reasons or self.stores.notes) or "no entry has this key"

    def _keep(self, entry: Entry) -> None:
        with entry:
            self.stores.keep(entry)

    def _explain(self, outcome: Outcome) -> None:
        found = self.stores.nearest(outcome.factors)
        if found is None:
            logger.info("fastload: compile cache: miss %s: %s", outcome.key[:12], outcome.reason)
            return
        outcome.nearest_key, differing = found
        outcome.differing = [str(difference) for difference in differing]
        logger.info(
            "fastload: compile cache: miss %s: %s; the nearest entry %s differs in: %s",
            outcome.key[:12],
            outcome.reason,
            outcome.nearest_key[:12],
            "; ".join(outcome.differing) or "nothing",
        )

    def _publish(
        self, outcome: Outcome, roots: Mapping[str, Path], how: Packing, *, replace: bool
    ) -> None:
        begun_s = self._clock.monotonic_s()
        try:
            with contextlib.closing(_spool()) as blob:
                manifest = pack(outcome.factors, roots, blob, how)
                if not manifest.files:
                    outcome.published = dict.fromkeys(self._names(), "nothing was compiled")
                    return
                package = Package(manifest, encode_manifest(manifest, self._keys), blob)
                done = self.stores.put(package, replace=replace)
            outcome.published = {
                name: "stored" if published.stored else published.reason
                for name, published in done.items()
            }
        except (FastloadError, OSError) as error:
            outcome.published = dict.fromkeys(self._names(), f"{type(error).__name__}: {error}")
            raise
        finally:
            outcome.publish_s = self._clock.monotonic_s() - begun_s
            outcome.notes = list(self.stores.notes)

    def _names(self) -> list[str]:
        stores = (self.stores.node, self.stores.remote)
        return [store.name for store in stores if store is not None]


def _spool() -> BinaryIO:
    return cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES))
