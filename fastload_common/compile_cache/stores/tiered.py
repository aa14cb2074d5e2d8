"""The node's directory first, then S3: what is found behind is kept in front.

Each tier may be missing or fail by itself; a failure is a note of the outcome and one warning, and
the next tier is asked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial

from fastload_common.clock import Clock
from fastload_common.compile_cache.background import within
from fastload_common.compile_cache.factors import Factors
from fastload_common.compile_cache.key import Difference, nearest
from fastload_common.compile_cache.manifest import Manifest
from fastload_common.compile_cache.stores.base import Entry, Package, Published, Store
from fastload_common.compile_cache.stores.node import NodeStore
from fastload_common.compile_cache.stores.s3 import S3Store
from fastload_common.errors import (
    BundleInvalidError,
    BundleUnfitError,
    BundleUntrustedError,
    FastloadError,
)

__all__ = ["TieredStore"]

logger = logging.getLogger(__name__)

_MOST_COMPARED = 64
"""Manifests of each store that a miss is compared with; in S3 each is a request."""


class TieredStore:
    """Both stores of one configuration.

    Args:
        node: asked first.
        remote: asked where the node has no entry, or a damaged one.
        deadline_s: longest wait for the remote store.

    Attributes:
        notes: what went wrong so far, one sentence each.
        replaced: names of stores whose entry proved to be of no use: the next one replaces it.
        unfit: names of stores whose entry is of use to others only: none replaces it.
    """

    def __init__(
        self, node: NodeStore | None, remote: S3Store | None, *, deadline_s: float, clock: Clock
    ) -> None:
        self.node = node
        self.remote = remote
        self._deadline_s = deadline_s
        self._clock = clock
        self.notes: list[str] = []
        self.replaced: set[str] = set()
        self.unfit: set[str] = set()

    def candidates(self, key: str) -> Iterator[Entry]:
        """The entries under a key, the nearest first; the caller closes each."""
        for store in self._stores():
            try:
                entry = self._get(store, key)
            except (BundleInvalidError, BundleUntrustedError) as error:
                self.reject(store.name, key, error)
                continue
            except BundleUnfitError as error:
                self.unfit.add(store.name)
                self._note(store.name, "has an entry for others", error)
                continue
            except (FastloadError, OSError) as error:
                self._note(store.name, "is not used", error)
                continue
            if entry is not None:
                yield entry

    def reject(self, store: str, key: str, error: Exception) -> None:
        """An entry proved to be damaged or not to be trusted: nobody shall meet it again."""
        self.replaced.add(store)
        out_of_the_way = False
        # One that somebody else signed may be of use to him.
        is_damaged = not isinstance(error, BundleUntrustedError)
        if is_damaged and self.node is not None and self.node.name == store:
            out_of_the_way = self.node.reject(key)
        more = "; it was moved to quarantine" if out_of_the_way else ""
        self._note(store, "has an entry that is of no use", error, more)

    def keep(self, entry: Entry) -> None:
        """Give each tier before the one that an entry came from the entry as well."""
        if self.node is not None and entry.store != self.node.name:
            self._put(self.node, Package(entry.manifest, entry.envelope, entry.blob))
        elif self.remote is not None and entry.store != self.remote.name:
            self._put(self.remote, Package(entry.manifest, entry.envelope, entry.blob))

    def put(self, package: Package, *, replace: bool = False) -> dict[str, Published]:
        """Publish in each tier; store -> how it went. Never raises what a store raises."""
        return {store.name: self._put(store, package, replace=replace) for store in self._stores()}

    def nearest(self, factors: Factors) -> tuple[str, list[Difference]] | None:
        """The entry that differs least from these factors, and in what."""
        known: dict[str, Manifest] = {}
        for manifest in self._manifests():
            known.setdefault(manifest.key, manifest)
        return nearest(((key, m.factors) for key, m in known.items()), factors)

    def _manifests(self) -> Iterator[Manifest]:
        # Whoever looks for reasons must not cause trouble.
        with contextlib.suppress(FastloadError, OSError):
            if self.node is not None:
                yield from self.node.manifests(_MOST_COMPARED)
        with contextlib.suppress(FastloadError, OSError):
            if self.remote is not None:
                remote, asked = self.remote, f"ask {self.remote.name} for its entries"
                yield from within(
                    self._clock,
                    self._deadline_s,
                    asked,
                    lambda: list(remote.manifests(_MOST_COMPARED)),
                )

    def _stores(self) -> list[Store]:
        return [store for store in (self.node, self.remote) if store is not None]

    def _get(self, store: Store, key: str) -> Entry | None:
        if store is self.node:
            return store.get(key)
        asked = f"ask {store.name} for a compiled entry"
        return within(self._clock, self._deadline_s, asked, lambda: store.get(key))

    def _put(self, store: Store, package: Package, *, replace: bool = False) -> Published:
        try:
            replace = (replace or store.name in self.replaced) and store.name not in self.unfit
            put = partial(store.put, package, replace=replace)
            asked = f"store an entry in {store.name}"
            published = (
                put() if store is self.node else within(self._clock, self._deadline_s, asked, put)
            )
        except (FastloadError, OSError) as error:
            self._note(store.name, "took no entry", error)
            return Published(False, _words(error))
        if published.stored:
            self.replaced.discard(store.name)
        return published

    def _note(self, store: str, what: str, error: Exception, more: str = "") -> None:
        note = f"{store} {what}: {_words(error)}{more}"
        # The same trouble at restoring and at publishing is one trouble.
        if not any(known.startswith(f"{store} ") for known in self.notes):
            logger.warning("fastload: compile cache: %s", note)
        self.notes.append(note)


def _words(error: Exception) -> str:
    if isinstance(error, FastloadError):
        return f"{type(error).__name__}: {error}"
    return f"{type(error).__name__}: {getattr(error, 'strerror', None) or ''}".rstrip(": ")
