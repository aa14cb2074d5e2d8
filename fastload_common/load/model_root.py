"""Open a model's root so that its files can be read; what cannot be read in its place is unpacked.

Compressed layers of an artifact have no place that could be asked for. The whole artifact is then
unpacked on this node, once (`load.unpacked`), and read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastload_common.clock import Clock, SystemClock
from fastload_common.config import Settings
from fastload_common.errors import ObjectMissingError, SourceError
from fastload_common.load.phases import NoPhases, PhaseTimer
from fastload_common.load.report import LoadReport
from fastload_common.load.unpacked import Unpacked, UnpackedArtifact
from fastload_common.load.unpacked_root import unpacked_root
from fastload_common.source.base import ObjectSource
from fastload_common.source.local import LocalSource
from fastload_common.source.oci import OciSource
from fastload_common.source.oci_layers import LayerKind, compression_of
from fastload_common.source.registry import open_source
from fastload_common.units import format_size

__all__ = ["Unpacking", "open_model_root", "open_readable_root", "unpacking_of"]


@dataclass(frozen=True, slots=True)
class Unpacking:
    """What a load of this artifact does first, here.

    Attributes:
        kinds: the layers' compressions.
        compressed, layers: how many there are.
        size_bytes: of all layers, as they are stored.
        there: whether it is unpacked on this node already.
    """

    kinds: Sequence[str]
    compressed: int
    layers: int
    size_bytes: int
    artifact: UnpackedArtifact
    there: Unpacked | None

    def __str__(self) -> str:
        what = f"{self.compressed} of {self.layers} layers compressed ({', '.join(self.kinds)})"
        if self.there is not None:
            return f"{what}; unpacked in {self.there.tree}"
        return (
            f"{what}: a load on this node pulls {format_size(self.size_bytes)} and unpacks them in "
            f"{self.artifact.directory}"
        )


def open_model_root(
    uri: str,
    settings: Settings,
    report: LoadReport | None = None,
    progress: bool = True,
    check: Callable[[], None] = lambda: None,
    *,
    clock: Clock | None = None,
) -> ObjectSource:
    """Open a root for a load; the caller closes it. May take as long as a pull.

    Args:
        report: told what was unpacked; its start is the load's, from which the deadline counts.
        progress: whether this process may show a progress display.
        check: called while waiting for another process; what it raises ends the wait.
        clock: for waits and the deadline; default: the report's, or the machine's.

    Raises:
        ConfigError: see `open_source`; or there is no directory to unpack in.
        SourceError, PullError, DeadlineError: the artifact cannot be read or unpacked.
    """
    clock = clock or (SystemClock() if report is None else report.clock)
    source = open_source(uri, settings)
    if not isinstance(source, OciSource):
        return source
    phases: PhaseTimer = NoPhases() if report is None else report
    try:
        with phases.phase("pull"):
            unpacking = unpacking_of(source, settings, clock)
            if unpacking is None:
                return source
            found = unpacking.there or unpacking.artifact.get(
                started_s=clock.monotonic_s() if report is None else report.started_s,
                progress=progress,
                check=check,
            )
        if report is not None:
            report.pulled = found.facts
        return _below(found, source)
    except BaseException:
        source.close()
        raise


def open_readable_root(uri: str, settings: Settings) -> ObjectSource:
    """The same for whoever only looks: nothing is pulled.

    Raises:
        SourceError: it would have to be; the message says where to and how much.
    """
    source = open_source(uri, settings)
    try:
        unpacking = unpacking_of(source, settings, SystemClock())
        if unpacking is None:
            return source
        if unpacking.there is not None:
            return _below(unpacking.there, source)
        raise SourceError(
            f"{uri} cannot be read by range: {unpacking}",
            hint=f"start the engine on this node, or fastload pull {uri} DIRECTORY and name that; "
            "or push it without compression",
        )
    except BaseException:
        source.close()
        raise


def unpacking_of(source: ObjectSource, settings: Settings, clock: Clock) -> Unpacking | None:
    """What must be unpacked before this source can be read; None: nothing.

    Raises:
        ConfigError: there is no directory for it.
        SourceError: the registry does not have the artifact, or does not answer.
    """
    if not isinstance(source, OciSource):
        return None
    layers = source.layers()
    compressed = [one.descriptor for one in layers if one.kind is LayerKind.COMPRESSED]
    if not compressed:
        return None
    wanted = {
        one.descriptor.digest: one.descriptor.size_bytes
        for one in layers
        if one.kind is not LayerKind.ASIDE
    }
    artifact = UnpackedArtifact(unpacked_root(settings), source.manifest_uri, settings, clock)
    return Unpacking(
        sorted({compression_of(one.media_type) for one in compressed}),
        len(compressed),
        len(layers),
        sum(wanted.values()),
        artifact,
        artifact.find(),
    )


def _below(unpacked: Unpacked, source: ObjectSource) -> LocalSource:
    """The folder that was asked for; the registry is not asked any more."""
    assert isinstance(source, OciSource)
    directory = unpacked.tree / source.folder if source.folder else unpacked.tree
    if not directory.is_dir():
        raise ObjectMissingError(
            f"no such folder in {source.root}: {source.folder}",
            hint="the name after the tag or digest is a folder of the files in it",
            uri=source.root,
        )
    source.close()
    return _UnpackedSource(directory, source.root)


class _UnpackedSource(LocalSource):
    """A folder of what was unpacked. Knows what the operator called it."""

    def __init__(self, directory: Path, uri: str) -> None:
        super().__init__(directory)
        self._top, self._uri = directory, uri

    def layout_hint(self) -> str:
        """Where weights are, if not here; in the operator's words."""
        folders = {path.parent for path in self._top.rglob("*.safetensors")} - {self._top}
        if not folders:
            return super().layout_hint()
        first = f"{self._uri}/{min(folders).relative_to(self._top)}"
        return f"there are weights in {len(folders)} folders of it, such as {first}: name one"
