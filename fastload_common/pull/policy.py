"""What an archive may ask for, and what this process may give: pure decisions and small calls.

`refuse` is for what comes from anybody. `keep` is for images whose maker is trusted as root: their
directories hold programs with set-user-ID, as every operating system has them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass, field
from typing import Literal

from fastload_common.errors import ArchiveInvalidError, ArchiveUnsafeError
from fastload_common.pull.safe_tree import Parts, shown
from fastload_common.pull.tar_header import Entry, Kind
from fastload_common.units import GIB, format_size

__all__ = [
    "DIRECTORY_BYTES",
    "SPECIALS",
    "Allowance",
    "Ownership",
    "Special",
    "check_linked",
    "check_symlink",
    "device_refused",
    "disk_bytes",
    "make_device",
    "mode_of",
    "set_xattrs",
    "xattrs_of",
]

Special = Literal["refuse", "drop", "keep"]
"""What becomes of set-id bits, privileged attributes, devices and pipes."""
SPECIALS: tuple[Special, ...] = ("refuse", "drop", "keep")

_SET_ID = 0o6000
_BASE_BYTES = 1 * GIB
_LARGEST_RATIO = 64
_MOST_ENTRIES = 4_000_000
_BLOCK_BYTES = 4096
DIRECTORY_BYTES = _BLOCK_BYTES
"""What a directory takes on a disk."""
_INLINE_LINK_BYTES = 59  # a longer symbolic link takes a block of its own
_HINT = (
    "pass --special keep for an image of an operating system that you trust, or --special drop to "
    "unpack it without"
)
# What the kernel or the file system does not let this process set is left out.
_NOT_ALLOWED = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EINVAL, errno.ENODATA)
# ENOSPC comes also where one file's attributes are more than its block holds.
_TOO_LARGE = (errno.E2BIG, errno.ENOSPC, errno.ERANGE, errno.ENAMETOOLONG)


class Allowance:
    """How much all layers of a pull may unpack to. Shared by threads: counted too much at worst.

    Args:
        compressed_bytes: of all layers.
        most_bytes: the operator's bound; None: what sound images never reach.
    """

    def __init__(self, compressed_bytes: int, most_bytes: int | None = None) -> None:
        self._is_set = most_bytes is not None
        self._most_bytes = (
            _BASE_BYTES + _LARGEST_RATIO * compressed_bytes if most_bytes is None else most_bytes
        )
        self._bytes: dict[int, int] = {}
        self._disk_bytes: dict[int, int] = {}
        self._entries: dict[int, int] = {}

    def entry(self, layer: int, size_bytes: int, so_far_bytes: int, on_disk_bytes: int) -> None:
        """A layer wants to unpack an entry of so many bytes.

        Args:
            so_far_bytes: what the layer has unpacked to, headers included.
            on_disk_bytes: what all its entries take on a disk, this one included.

        Raises:
            ArchiveUnsafeError: that is too much.
        """
        self._entries[layer] = self._entries.get(layer, 0) + 1
        self._disk_bytes[layer] = on_disk_bytes
        self.content(layer, so_far_bytes + size_bytes)
        if sum(self._entries.values()) > _MOST_ENTRIES:
            raise ArchiveUnsafeError(
                f"the layers have more than {_MOST_ENTRIES} entries", hint="unpack it otherwise"
            )

    def resume(self, layer: int, archive_bytes: int, entries: int, on_disk_bytes: int) -> None:
        """A former pull has unpacked a layer; raises as `content`."""
        self._entries[layer] = entries
        self._disk_bytes[layer] = on_disk_bytes
        self.content(layer, archive_bytes)

    def content(self, layer: int, so_far_bytes: int) -> None:
        """A layer has unpacked to so many bytes.

        Raises:
            ArchiveUnsafeError: that is too much.
        """
        self._bytes[layer] = so_far_bytes
        total_bytes = max(sum(self._bytes.values()), sum(self._disk_bytes.values()))
        if total_bytes > self._most_bytes:
            whose = "max_unpacked_bytes" if self._is_set else "64 times their compressed size"
            raise ArchiveUnsafeError(
                f"the layers unpack to {format_size(total_bytes)} or more, above the bound of "
                f"{format_size(self._most_bytes)} ({whose})",
                hint="if that is right, raise FASTLOAD_MAX_UNPACKED_BYTES",
            )


@dataclass(slots=True)
class Ownership:
    """Gives files to whom the archive says, as long as that is allowed. One per thread.

    Attributes:
        refused: files that stayed this user's.
    """

    is_tried: bool = field(default_factory=lambda: os.geteuid() == 0)
    refused: int = 0

    def give(self, name: int | bytes, uid: int, gid: int, above: int | None = None) -> None:
        """Set owner and group of a descriptor, or of a name in a directory."""
        if not self.is_tried:
            self.refused += uid != os.geteuid()
            return
        try:
            if above is None:
                os.chown(name, uid, gid)
            else:
                os.chown(name, uid, gid, dir_fd=above, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NOT_ALLOWED:
                raise
            self.refused += 1


def disk_bytes(entry: Entry) -> int:
    """What an entry takes on a file system of 4 KiB blocks.

    A directory one block, a file's content whole blocks, attributes one, a long symbolic link one.
    Empty files, hard links and short symbolic links take none: they are counted by their headers.
    """
    if entry.kind is Kind.DIRECTORY:
        blocks = 1
    elif entry.kind is Kind.SYMLINK:
        blocks = int(len(entry.link) > _INLINE_LINK_BYTES)
    else:
        blocks = -(-entry.size_bytes // _BLOCK_BYTES)
    return (blocks + bool(entry.xattrs)) * _BLOCK_BYTES


def mode_of(entry: Entry, parts: Parts, special: Special) -> int:
    """The mode that a file or directory gets.

    Raises:
        ArchiveUnsafeError: it has set-id bits, which are refused.
    """
    if entry.mode & _SET_ID and entry.kind is not Kind.DIRECTORY:
        if special == "refuse":
            which = "set-user-ID" if entry.mode & 0o4000 else "set-group-ID"
            raise ArchiveUnsafeError(f"{shown(parts)} has the {which} bit", hint=_HINT)
        if special == "drop":
            return entry.mode & ~_SET_ID
    if entry.kind is Kind.DIRECTORY and special != "keep":
        return entry.mode & ~_SET_ID
    return entry.mode


def xattrs_of(entry: Entry, parts: Parts, special: Special) -> tuple[tuple[bytes, bytes], ...]:
    """The extended attributes that are to be set.

    Raises:
        ArchiveUnsafeError: one gives privileges, and that is refused.
    """
    if not entry.xattrs:
        return ()
    plain = {name: value for name, value in entry.xattrs.items() if name.startswith(b"user.")}
    if special == "keep":
        return tuple(entry.xattrs.items())
    if b"security.capability" in entry.xattrs and special == "refuse":
        raise ArchiveUnsafeError(f"{shown(parts)} has capabilities", hint=_HINT)
    return tuple(plain.items())


def set_xattrs(descriptor: int, xattrs: tuple[tuple[bytes, bytes], ...], parts: Parts) -> None:
    """Set attributes where that is allowed and the file system has them.

    Raises:
        ArchiveInvalidError: they are more than the file system takes.
    """
    for name, value in xattrs:
        try:
            os.setxattr(descriptor, name, value)
        except OSError as error:
            if error.errno in _TOO_LARGE:
                raise ArchiveInvalidError(
                    f"{shown(parts)}: the file system does not take the attribute {shown(name)} of "
                    f"{len(value)} bytes: {error.strerror}",
                    hint="store it without; or, where the disk is full, make room",
                ) from None
            if error.errno not in _NOT_ALLOWED:
                raise


def device_refused(entry: Entry, parts: Parts, special: Special) -> bool:
    """Whether a device or pipe is left out; else it is to be made.

    Raises:
        ArchiveUnsafeError: it is refused.
    """
    if special == "refuse":
        what = "a pipe" if entry.kind is Kind.FIFO else "a device"
        raise ArchiveUnsafeError(f"{shown(parts)} is {what}", hint=_HINT)
    return special == "drop"


def check_symlink(parts: Parts, target: bytes, *, is_image: bool) -> None:
    """Whether a symbolic link may be made.

    In an image's root file system links may lead anywhere: they mean its own root. Elsewhere
    whoever reads the directory follows them, so they must stay inside.

    Raises:
        ArchiveUnsafeError: it leads out, or nowhere.
    """
    if not target or b"\0" in target or len(target) > 4095:
        raise ArchiveUnsafeError(f"{shown(parts)} is a symbolic link to {shown(target)}")
    if is_image:
        return
    steps = [step for step in target.split(b"/") if step not in (b"", b".")]
    climbs = next((n for n, step in enumerate(steps) if step != b".."), len(steps))
    # Only in front: what comes after a step that is a link itself could leave the directory.
    if target.startswith(b"/") or climbs > len(parts) - 1 or b".." in steps[climbs:]:
        raise ArchiveUnsafeError(
            f"{shown(parts)} is a symbolic link that leads out of the directory: {shown(target)}",
            hint="only images of file systems may have such links",
        )


def check_linked(parts: Parts, above: int, *, is_image: bool) -> None:
    """As `check_symlink`, for a hard link: from its own place a link leads elsewhere.

    Raises:
        ArchiveUnsafeError: it is a symbolic link that leads out.
    """
    if not is_image and stat.S_ISLNK(os.lstat(parts[-1], dir_fd=above).st_mode):
        check_symlink(parts, os.readlink(parts[-1], dir_fd=above), is_image=False)


def make_device(entry: Entry, name: bytes, above: int) -> bool:
    """Make a pipe or a device; False where this process may not."""
    with contextlib.suppress(PermissionError):
        os.mknod(name, _TYPES[entry.kind] | 0o600, entry.device, dir_fd=above)
        return True
    return False


_TYPES = {
    Kind.FIFO: stat.S_IFIFO,
    Kind.CHARACTER_DEVICE: stat.S_IFCHR,
    Kind.BLOCK_DEVICE: stat.S_IFBLK,
}
