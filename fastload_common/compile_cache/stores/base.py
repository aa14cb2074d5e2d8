"""What a store of bundles can do. Knows keys, manifests and archives; not what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Protocol

from fastload_common.compile_cache.manifest import Limits, Manifest, decode_manifest
from fastload_common.compile_cache.trust import Keys
from fastload_common.errors import (
    BundleUnfitError,
    BundleUntrustedError,
    CompileCacheError,
    StoreUnsafeError,
)

__all__ = ["Entry", "Package", "Published", "Sighting", "Store", "look_at"]


class Entry:
    """An entry that a store gave: its manifest is checked, its archive is not yet.

    The archive stays readable, whatever happens to the store meanwhile. Close it.
    """

    def __init__(self, manifest: Manifest, envelope: bytes, blob: BinaryIO, store: str) -> None:
        self.manifest = manifest
        self.envelope = envelope
        self.blob = blob
        self.store = store

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.blob.close()


@dataclass(frozen=True, slots=True)
class Package:
    """A bundle that is to be stored.

    Attributes:
        manifest: of the archive.
        envelope: the manifest as it is written, signed where it is.
        blob: the archive; seekable, its owner closes it.
    """

    manifest: Manifest
    envelope: bytes
    blob: BinaryIO


@dataclass(frozen=True, slots=True)
class Published:
    """How it went.

    Attributes:
        stored: this call put the entry there.
        reason: why it did not, in words.
    """

    stored: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What there is to see under a key, of use or not.

    Attributes:
        manifest: None where it cannot be read.
        fault: why no start takes it: ``not trusted``, ``not for this process``, ``others can write
            it`` or ``damaged``; empty where nothing in the manifest speaks against it.
    """

    key: str
    manifest: Manifest | None
    fault: str = ""


def look_at(
    key: str, read: Callable[[], bytes | None], keys: Keys | None, limits: Limits
) -> Sighting | None:
    """Look at a manifest; None if there is none.

    Args:
        read: gives its bytes.
    """
    envelope = None
    try:
        envelope = read()
        if envelope is None:
            return None
        return Sighting(key, decode_manifest(envelope, keys=keys, key=key, limits=limits))
    except BundleUntrustedError:
        # Only to be shown.
        seen = look_at(key, lambda: envelope, None, limits)
        return Sighting(key, seen.manifest if seen else None, "not trusted")
    except BundleUnfitError:
        return Sighting(key, None, "not for this process")
    except StoreUnsafeError:
        return Sighting(key, None, "others can write it")
    except CompileCacheError:
        return Sighting(key, None, "damaged")


class Store(Protocol):
    """A store. Every method may raise `OSError` or `FastloadError`; callers make a miss of it."""

    @property
    def name(self) -> str:
        """For messages: a directory or an URI."""
        ...

    def get(self, key: str) -> Entry | None:
        """The entry; None if there is none.

        Raises:
            BundleInvalidError: its manifest is damaged.
            BundleUnfitError: it is for others.
            BundleUntrustedError: it is not signed as it must be.
        """
        ...

    def put(self, package: Package, *, replace: bool = False) -> Published:
        """Store an entry whole, or not at all.

        Args:
            replace: also where there is one, which is known to be of no use.
        """
        ...

    def keys(self) -> list[str]:
        """The keys of all entries."""
        ...

    def manifest(self, key: str) -> Manifest | None:
        """Only the manifest; None if there is no such entry or it is of no use."""
        ...

    def look(self, keys: list[str] | None = None) -> Iterator[Sighting]:
        """All entries, or some, whether they are of use or not."""
        ...

    def manifests(self, most: int | None = None) -> Iterator[Manifest]:
        """The manifests of all entries that are of use, or of some.

        Args:
            most: look at no more than these.
        """
        ...
