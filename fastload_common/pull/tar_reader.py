"""The entries of a tar archive, one after the other, from a stream, within a bound of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastload_common.errors import ArchiveInvalidError
from fastload_common.pull.tar_header import (
    BLOCK_BYTES,
    Entry,
    Kind,
    PaxRecords,
    parse_header,
    parse_pax,
)
from fastload_common.units import MIB

__all__ = ["TarReader"]

# What Linux allows for a path; a longer one could not be made.
_LONGEST_NAME_BYTES = 4096
_LONGEST_PAX_BYTES = 1 * MIB
_NOTHING = bytes(BLOCK_BYTES)


class TarReader:
    """Reads entries; the content of one must be taken before the next is asked for.

    Args:
        next_piece: the archive's bytes, piece by piece; empty at the end.

    Attributes:
        read_bytes: of the archive, so far.
    """

    def __init__(self, next_piece: Callable[[], bytes]) -> None:
        self._next_piece = next_piece
        self._piece = memoryview(b"")
        self._at = 0
        self.read_bytes = 0

    def entries(self) -> Iterator[Entry]:
        """All entries. The rest of the stream is read as well, and thrown away.

        Raises:
            ArchiveInvalidError: not a tar archive, damaged, cut off, or of a kind we do not read.
        """
        while (entry := self._next_entry()) is not None:
            self._left_bytes = entry.size_bytes
            yield entry
            for _ in self.content():
                pass
            # At the end it may be missing, as umoci leaves it out: no byte of a file is lost.
            self._up_to(-entry.size_bytes % BLOCK_BYTES)
        while self._some(1 << 62):
            pass

    def content(self) -> Iterator[memoryview]:
        """What is left of the present entry's content; each piece is valid for as long as held."""
        while self._left_bytes:
            part = self._some(self._left_bytes)
            if not part:
                raise _cut_off(f"within the content of an entry, {self._left_bytes} bytes missing")
            self._left_bytes -= len(part)
            yield part

    def _next_entry(self) -> Entry | None:
        pax: PaxRecords | None = None
        long_name = long_link = None
        while True:
            block = self._block(at_boundary=pax is None and long_name is None and long_link is None)
            if block is None:
                return None
            entry = parse_header(block)
            if entry.kind is Kind.PAX_GLOBAL:
                parse_pax(self._extension(entry, _LONGEST_PAX_BYTES), is_global=True)
            elif entry.kind is Kind.PAX:
                if pax is not None:
                    raise _odd("an entry has two extended headers")
                pax = parse_pax(self._extension(entry, _LONGEST_PAX_BYTES))
            elif entry.kind is Kind.GNU_LONG_NAME:
                long_name = self._long_text(entry, long_name)
            elif entry.kind is Kind.GNU_LONG_LINK:
                long_link = self._long_text(entry, long_link)
            else:
                break
        entry.name = entry.name if long_name is None else long_name
        entry.link = entry.link if long_link is None else long_link
        if pax is not None:
            pax.apply(entry)
        if entry.kind is Kind.FILE and entry.name.endswith(b"/"):
            raise _odd(f"{entry.shown} is a file whose name ends as a directory's")
        return entry

    def _block(self, *, at_boundary: bool) -> bytes | None:
        """The next header; None at the end of the archive."""
        block = self._up_to(BLOCK_BYTES)
        if not block and at_boundary:
            return None  # without an end mark, as some programs write
        if len(block) < BLOCK_BYTES:
            raise _cut_off("within a header")
        if block != _NOTHING:
            return block
        if not at_boundary:
            raise _cut_off("after an extended header, without its entry")
        second = self._up_to(BLOCK_BYTES)
        if second not in (b"", _NOTHING):
            raise _odd("after one empty block comes another entry")
        return None

    def _long_text(self, entry: Entry, before: bytes | None) -> bytes:
        if before is not None:
            raise _odd("an entry has two long names")
        text = self._extension(entry, _LONGEST_NAME_BYTES + 1)
        name, _, rest = text.partition(b"\0")
        if rest.strip(b"\0"):
            raise _odd("a long name holds a NUL")
        return name

    def _extension(self, entry: Entry, most_bytes: int) -> bytes:
        if entry.size_bytes > most_bytes:
            raise _odd(f"an extended header of {entry.size_bytes} bytes: at most {most_bytes}")
        data = self._exactly(entry.size_bytes)
        self._exactly(-entry.size_bytes % BLOCK_BYTES)
        return data

    def _exactly(self, size_bytes: int) -> bytes:
        data = self._up_to(size_bytes)
        if len(data) < size_bytes:
            raise _cut_off("after an entry")
        return data

    def _up_to(self, size_bytes: int) -> bytes:
        part = self._some(size_bytes) if size_bytes else b""
        if len(part) == size_bytes:
            return bytes(part)
        parts = [bytes(part)]
        missing_bytes = size_bytes - len(part)
        while missing_bytes and (part := self._some(missing_bytes)):
            parts.append(bytes(part))
            missing_bytes -= len(part)
        return b"".join(parts)

    def _some(self, most_bytes: int) -> memoryview:
        """Some of the next bytes; empty only at the end of the stream."""
        if self._at == len(self._piece):
            self._piece = memoryview(self._next_piece())
            self._at = 0
        part = self._piece[self._at : self._at + most_bytes]
        self._at += len(part)
        self.read_bytes += len(part)
        return part

    _left_bytes = 0


def _cut_off(where: str) -> ArchiveInvalidError:
    return ArchiveInvalidError(
        f"the archive is cut off {where}", hint="pull again; if it stays so, it was stored so"
    )


def _odd(what: str) -> ArchiveInvalidError:
    return ArchiveInvalidError(
        f"not a sound tar archive: {what}", hint="the archive is damaged, or was made to harm"
    )
