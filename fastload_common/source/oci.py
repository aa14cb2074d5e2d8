"""The files of an artifact or image in a registry. Read by range, in their layers; never unpacked.

Guarantees: the reference is resolved once, and its digest pins what is read; nothing is asked of a
compressed layer. A `Receiver` does not retry: the transfer does.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fastload_common.checksums.algorithms import Checksum
from fastload_common.clock import Clock
from fastload_common.config import Settings
from fastload_common.errors import FastloadError, ObjectMissingError, SourceError
from fastload_common.ranges import ByteRange, ObjectId
from fastload_common.source.base import ListedObject, Receiver, RemoteReads, SourceDescription
from fastload_common.source.oci_image import OciImage
from fastload_common.source.oci_layers import Layer, LayerKind, compression_of, layers_of
from fastload_common.source.oci_reads import state_of
from fastload_common.source.oci_reference import OciReference
from fastload_common.source.oci_tar import TarIndex, read_tar_index
from fastload_common.source.oci_tree import FileAt, FileTree

__all__ = ["OciSource"]

_LOG = logging.getLogger(__name__)
_THREADS = 8


class OciSource:
    """``oci://registry/repository[:tag|@digest][/folder]`` as an `ObjectSource`.

    Holds plain data until it is used, and may be pickled, used after a fork, and by any thread.

    Args:
        reference: the artifact, and the folder of its files that is the root.
        settings: timeouts, attempts, anonymous, ``oci_*``.
        clock: for waits, receipts and the life of tokens.
    """

    def __init__(
        self, reference: OciReference, settings: Settings, clock: Clock | None = None
    ) -> None:
        self._reference = reference
        self._settings = settings
        self._image = OciImage(reference, settings, clock)
        self._locks: dict[int, threading.Lock] = {}  # by process: see `OciImage`
        self._files: dict[str, FileAt] | None = None

    @property
    def root(self) -> str:
        return self._reference.uri

    def pinned_uri(self) -> str:
        """The same root named by the digest that the reference has now.

        Raises:
            SourceError: there is no such artifact, or it cannot be read.
        """
        return self._reference.pinned(self._image.digest).uri

    @property
    def manifest_uri(self) -> str:
        """The artifact by the digest of its manifest, the platform chosen; without the folder.

        Raises:
            SourceError: as `pinned_uri`.
        """
        chosen = self._reference.pinned(self._image.manifest.digest)
        return replace(chosen, folder="").uri

    @property
    def folder(self) -> str:
        """Of the artifact's files, which is the root; empty for all."""
        return self._reference.folder

    def layers(self) -> Sequence[Layer]:
        """The layers in their order; where one is compressed, no file can be read.

        Raises:
            SourceError: as `pinned_uri`; or two are files of one name, or a name is none.
        """
        return layers_of(self._image.manifest, self._reference.artifact_uri)

    def blob(self, layer: Layer) -> ObjectId:
        """A layer as it is stored."""
        return self._image.blob(layer.descriptor)

    def list(self, *, recursive: bool = True) -> Sequence[ListedObject]:
        return [
            ListedObject(key, self._object_id(key, file))
            for key, file in self._known_files().items()
            if recursive or "/" not in key
        ]

    def stat(self, key: str) -> ObjectId:
        file = self._known_files().get(key)
        if file is None:
            uri = f"{self.root}/{key}"
            raise ObjectMissingError(f"no such file in the artifact: {uri}", uri=uri)
        return self._object_id(key, file)

    def read(self, object_id: ObjectId, byte_range: ByteRange | None = None) -> bytes:
        is_layer = object_id.etag is not None and "+" not in object_id.etag
        if is_layer and byte_range in (None, ByteRange(0, object_id.size_bytes)):
            # The only thing that a digest can be compared with.
            return self._image.read_checked(object_id)
        return self._image.read(object_id, byte_range)

    def senders(self, object_id: ObjectId) -> str:
        """See `TellsSenders.senders`."""
        return self._image.senders(object_id)

    def stored_checksum(self, object_id: ObjectId) -> Checksum | None:
        """None: registries keep digests, which cannot be put together from ranges."""
        return None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        raise SourceError(
            f"nothing is written to a registry: {self.root}/{key}",
            hint="name a directory or s3://bucket/prefix",
        )

    def open_receiver(self) -> Receiver:
        return self._image.open_receiver()

    def remote_reads(self, object_id: ObjectId) -> RemoteReads:
        """See `RemoteSource.remote_reads`."""
        return self._image.remote_reads(object_id)

    def describe(self) -> SourceDescription:
        try:
            return SourceDescription("oci", self.root, self._image.facts())
        except FastloadError as error:
            return SourceDescription("oci", self.root, {"error": str(error)})

    def close(self) -> None:
        self._image.close()

    def __reduce__(self) -> tuple[type[OciSource], tuple[OciReference, Settings]]:
        return (OciSource, (self._reference, self._settings))

    def _object_id(self, key: str, file: FileAt) -> ObjectId:
        return ObjectId(f"{self.root}/{key}", state_of(file.digest, file.start), file.size_bytes)

    def _known_files(self) -> dict[str, FileAt]:
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._files is None:
                self._files = self._find_files()
            return self._files

    def _find_files(self) -> dict[str, FileAt]:
        uri = self._reference.artifact_uri
        layers = self.layers()
        self._refuse_compressed(layers)
        indexes = self._tar_indexes(layers)
        tree = FileTree(uri)
        for layer in layers:
            digest = layer.descriptor.digest
            if layer.kind is LayerKind.FILE:
                file = FileAt(digest, None, layer.descriptor.size_bytes)
                tree.add_file(tuple(layer.name.split("/")), file)
            elif layer.kind is LayerKind.TAR:
                tree.add_layer(digest, indexes[digest])
            else:
                _LOG.info("%s: not read: a layer of %s", uri, layer.descriptor.media_type)
        files = tree.files(self._reference.folder)
        if files is None:
            raise ObjectMissingError(
                f"no such folder in {uri}: {self._reference.folder}",
                hint="the name after the tag or digest is a folder of the files in it",
                uri=self.root,
            )
        return files

    def _refuse_compressed(self, layers: Sequence[Layer]) -> None:
        """A file in a compressed layer has no place that could be asked for."""
        found = [one.descriptor for one in layers if one.kind is LayerKind.COMPRESSED]
        if not found:
            return
        kinds = sorted({compression_of(one.media_type) for one in found})
        raise SourceError(
            f"{self._reference.artifact_uri} has {len(found)} of {len(layers)} layers compressed "
            f"({', '.join(kinds)}), which cannot be read by range",
            hint="a load unpacks it on its node first; for anything else "
            f"fastload pull {self._reference.artifact_uri} DIRECTORY, and read there; or push it "
            "without compression",
            digest=found[0].digest,
            media_type=found[0].media_type,
        )

    def _tar_indexes(self, layers: Sequence[Layer]) -> dict[str, TarIndex]:
        """The entries of each archive, several archives at once."""
        tars = {
            one.descriptor.digest: one.descriptor for one in layers if one.kind is LayerKind.TAR
        }
        if not tars:
            return {}

        def index(digest: str) -> TarIndex:
            layer = tars[digest]
            blob = self._image.blob(layer)
            return read_tar_index(
                lambda start, end: self._image.read(blob, ByteRange(start, end)),
                layer.size_bytes,
                f"the layer {digest} of {self._reference.artifact_uri}",
            )

        with ThreadPoolExecutor(min(_THREADS, len(tars)), "fastload-tar") as pool:
            return dict(zip(tars, pool.map(index, tars), strict=True))
