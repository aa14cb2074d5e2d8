"""The files of several layers together, each over those below it. Pure.

As container runtimes do: what a layer holds replaces what is below; a whiteout (``.wh.name``)
removes it, an opaque one (``.wh..wh..opq``) everything in its folder; links are followed inside of
the tree only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Union

from fastload_common.errors import ArchiveInvalidError, SourceError
from fastload_common.source.oci_tar import EntryKind, TarEntry

__all__ = ["FileAt", "FileTree"]

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_MOST_LINKS = 40


@dataclass(frozen=True, slots=True)
class FileAt:
    """A file's bytes: a whole blob, or a part of one.

    Attributes:
        start: in the blob; None: the blob is the file.
    """

    digest: str
    start: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Link:
    target: str


_Folder = dict[str, Union["_Folder", FileAt, _Link]]
_Node = _Folder | FileAt | _Link


class _Names:
    """What the entries of one archive are called, each once, as `fastload pull` has it."""

    def __init__(self, uri: str, digest: str) -> None:
        self._uri = uri
        self._digest = digest
        self._kinds: dict[tuple[str, ...], EntryKind] = {}

    def add(self, entry: TarEntry) -> None:
        """Refuse a name that is taken, or that lies below one of a file."""
        path, kinds = entry.path, self._kinds
        there = kinds.get(path)
        if there is not None and not (there is entry.kind is EntryKind.FOLDER):
            is_folder = EntryKind.FOLDER in (there, entry.kind)
            why = "stands there as something else as well" if is_folder else "stands twice in it"
            raise self._contradiction(path, why)
        kinds[path] = entry.kind
        # Up to the first folder that is known: those above it are, too.
        for length in range(len(path) - 1, 0, -1):
            above = kinds.setdefault(path[:length], EntryKind.FOLDER)
            if above in (EntryKind.FILE, EntryKind.HARD_LINK):
                raise self._contradiction(path, "lies below what is no folder")

    def _contradiction(self, path: tuple[str, ...], why: str) -> ArchiveInvalidError:
        return ArchiveInvalidError(
            f"the layer {self._digest} of {self._uri} contradicts itself: "
            f"{'/'.join(path)[:200]} {why}",
            hint="the archive is damaged, or was made to harm",
        )


class FileTree:
    """Layers are added from the lowest up."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._root: _Folder = {}

    def add_file(self, path: tuple[str, ...], file: FileAt) -> None:
        """A layer that is one file."""
        self._put(path, file)

    def add_layer(self, digest: str, entries: Iterable[TarEntry]) -> None:
        """A layer that is an archive.

        Raises:
            SourceError: a hard link leads to nothing, or links lead in a circle.
            ArchiveInvalidError: two entries have one name, and are not both folders.
        """
        kept = []
        names = _Names(self._uri, digest)
        # Whiteouts are about the layers below, wherever they stand in theirs.
        for entry in entries:
            name = entry.path[-1] if entry.path else ""
            if name == _OPAQUE:
                folder = self._find(entry.path[:-1])
                if isinstance(folder, dict):
                    folder.clear()
            elif name.startswith(_WHITEOUT):
                folder = self._find(entry.path[:-1])
                if isinstance(folder, dict):
                    folder.pop(name.removeprefix(_WHITEOUT), None)
            elif entry.path:
                names.add(entry)
                kept.append(entry)
        for entry in kept:
            self._add(digest, entry)

    def files(self, folder: str) -> dict[str, FileAt] | None:
        """Keys below a folder with their files; links to files are files. None: no such folder."""
        root = self._find(_parts(folder))
        if not isinstance(root, dict):
            return None
        real = self._real(_parts(folder))
        return dict(sorted(self._walk(root, real, "")))

    def _walk(
        self, folder: _Folder, at: tuple[str, ...], prefix: str
    ) -> Iterator[tuple[str, FileAt]]:
        pending: list[tuple[_Folder, tuple[str, ...], str]] = [(folder, at, prefix)]
        while pending:
            present, path, before = pending.pop()
            for name, node in present.items():
                if isinstance(node, dict):
                    pending.append((node, (*path, name), f"{before}{name}/"))
                elif isinstance(node, FileAt):
                    yield before + name, node
                else:
                    # A folder's second name is not followed here: trees may be large.
                    leads_to = self._find((*path, name))
                    if isinstance(leads_to, FileAt):
                        yield before + name, leads_to

    def _add(self, digest: str, entry: TarEntry) -> None:
        if entry.kind is EntryKind.FILE:
            self._put(entry.path, FileAt(digest, entry.start, entry.size_bytes))
        elif entry.kind is EntryKind.FOLDER:
            self._folder(entry.path)
        elif entry.kind is EntryKind.LINK:
            self._put(entry.path, _Link(entry.target))
        elif entry.kind is EntryKind.HARD_LINK:
            target = self._node(_parts(entry.target))
            if not isinstance(target, FileAt | _Link):
                raise SourceError(
                    f"{self._uri}: a hard link leads to no file: {'/'.join(entry.path)[:200]}",
                    digest=digest,
                )
            self._put(entry.path, target)
        else:
            self._remove(entry.path)

    def _put(self, path: tuple[str, ...], node: FileAt | _Link) -> None:
        if path:
            self._folder(path[:-1])[path[-1]] = node

    def _remove(self, path: tuple[str, ...]) -> None:
        folder = self._find(path[:-1])
        if isinstance(folder, dict):
            folder.pop(path[-1], None)

    def _folder(self, path: tuple[str, ...]) -> _Folder:
        """The folder of this path; made, in the place of files if need be."""
        present = self._root
        for name in self._real(path):
            child = present.get(name)
            if not isinstance(child, dict):
                child = present[name] = {}
            present = child
        return present

    def _node(self, path: tuple[str, ...]) -> _Node | None:
        """What stands at a path; a link there is not followed."""
        folder = self._find(path[:-1])
        return folder.get(path[-1]) if path and isinstance(folder, dict) else None

    def _find(self, path: tuple[str, ...]) -> _Node | None:
        """What a path leads to, links followed; None: nothing, or links in a circle."""
        try:
            real = self._real(path)
        except SourceError:
            return None
        present: _Node = self._root
        for name in real:
            if not isinstance(present, dict) or name not in present:
                return None
            present = present[name]
        return None if isinstance(present, _Link) else present

    def _real(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The same path without links, as far as it exists; ``..`` does not leave the tree.

        Raises:
            SourceError: links lead in a circle.
        """
        left = list(reversed(path))
        done: list[str] = []
        nodes: list[_Folder | None] = [self._root]
        links = 0
        while left:
            name = left.pop()
            if name == "..":
                if done:
                    done.pop()
                    nodes.pop()
                continue
            folder = nodes[-1]
            node = folder.get(name) if folder is not None else None
            if isinstance(node, _Link):
                links += 1
                if links > _MOST_LINKS:
                    raise SourceError(
                        f"{self._uri}: links lead in a circle: {'/'.join(path)[:200]}"
                    )
                if node.target.startswith("/"):
                    done, nodes = [], [self._root]
                left += reversed(_parts(node.target))
                continue
            done.append(name)
            nodes.append(node if isinstance(node, dict) else None)
        return tuple(done)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part not in ("", "."))
