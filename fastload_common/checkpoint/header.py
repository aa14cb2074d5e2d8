"""Parse and validate the header of one safetensors file. Pure: bytes in, records out.

Accepts and refuses what the reference reader accepts and refuses, and besides says what a file
is that is something else. Nothing is fetched or allocated on the word of the length field before
that was compared with the object's size.

What cannot be seen here: a file of the right size whose data has a hole of zeros (an interrupted
copy into a preallocated file). Only a digest recorded at the source finds that.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from fastload_common.checkpoint.dtypes import DTYPE_BITS
from fastload_common.checkpoint.looks_like import looks_like
from fastload_common.checkpoint.records import TensorEntry
from fastload_common.checkpoint.strict_json import Pairs, check_limits, parse_json
from fastload_common.checkpoint.wording import short
from fastload_common.errors import HeaderInvalidError, HeaderTooLargeError, ShardTruncatedError
from fastload_common.ranges import ByteRange, ObjectId

__all__ = ["LENGTH_BYTES", "MAX_HEADER_BYTES", "Header", "NeedMore", "parse_header"]

LENGTH_BYTES = 8
"""The length field: little-endian, unsigned."""

MAX_HEADER_BYTES = 100_000_000
"""The reference reader's limit for the JSON text."""

_U64_MAX = 2**64 - 1
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_COPY_AGAIN = (
    "copy the shard again and compare its size and checksum with the source's; a hole inside a "
    "file of the right size is found by a checksum only"
)
_WRITE_AGAIN = "write the file again with the safetensors library"

# dtype, shape, begin, end: offsets relative to the data's start.
_Info = tuple[str, tuple[int, ...], int, int]


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header.

    Attributes:
        header_bytes: length field and JSON text together; the data begins here.
        entries: in the order of their bytes.
        metadata: the file's ``__metadata__``.
    """

    header_bytes: int
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class NeedMore:
    """The prefix is too short; parse again with this many bytes from the object's start.

    Never more than the object has, nor than the format allows.
    """

    prefix_bytes: int


def parse_header(prefix: bytes, object_id: ObjectId) -> Header | NeedMore:
    """Parse the first bytes of a safetensors file.

    Args:
        prefix: the object's first bytes, as many as there are at hand.
        object_id: names the object in the entries and errors; its size is checked.

    Raises:
        HeaderTooLargeError: the length field exceeds the format's limit.
        ShardTruncatedError: the object is shorter than its header says.
        HeaderInvalidError: not a safetensors file, or damaged.
    """
    size_bytes = object_id.size_bytes
    if size_bytes < LENGTH_BYTES:
        _refuse(
            f"its {size_bytes} bytes are fewer than the 8 of the length field", prefix, object_id
        )
    if len(prefix) < LENGTH_BYTES:
        return NeedMore(LENGTH_BYTES)
    (text_bytes,) = struct.unpack_from("<Q", prefix)
    header_bytes = LENGTH_BYTES + text_bytes
    if text_bytes > MAX_HEADER_BYTES:
        _refuse(
            f"its length field claims a header of {text_bytes} bytes; the format allows "
            f"{MAX_HEADER_BYTES}",
            prefix,
            object_id,
            kind=HeaderTooLargeError,
        )
    if header_bytes > size_bytes:
        _refuse_cut_header(header_bytes, prefix, object_id)
    if len(prefix) < header_bytes:
        return NeedMore(header_bytes)
    try:
        metadata, infos = _parse_text(prefix[LENGTH_BYTES:header_bytes])
        data_bytes = _check_layout(infos)
    except ValueError as error:
        _refuse(f"its header is damaged: {error}", prefix, object_id)
    _check_size(header_bytes + data_bytes, object_id)
    entries = tuple(
        TensorEntry(name, dtype, shape, object_id, ByteRange(header_bytes + s, header_bytes + e))
        for name, (dtype, shape, s, e) in infos
    )
    return Header(header_bytes, entries, metadata)


def _refuse(
    why: str,
    prefix: bytes,
    object_id: ObjectId,
    kind: type[HeaderInvalidError] = HeaderInvalidError,
) -> NoReturn:
    looks = looks_like(prefix, object_id.size_bytes)
    what = f"{object_id.uri} is not a valid safetensors file: "
    if looks is None:
        raise kind(what + why, hint=_WRITE_AGAIN, size_bytes=object_id.size_bytes)
    raise kind(
        f"{what}it looks like {looks.what} ({why})",
        hint=looks.hint,
        size_bytes=object_id.size_bytes,
    )


def _refuse_cut_header(header_bytes: int, prefix: bytes, object_id: ObjectId) -> NoReturn:
    """Tell a file that was cut inside its header from one that is no safetensors at all."""
    text = prefix[LENGTH_BYTES:].lstrip(b" \t\r\n")
    if looks_like(prefix, object_id.size_bytes) is None and (not text or text[:1] == b"{"):
        raise ShardTruncatedError(
            f"{object_id.uri} is cut short inside its header: at least {header_bytes} bytes are "
            f"needed, the object has {object_id.size_bytes}",
            hint=_COPY_AGAIN,
            expected_bytes=header_bytes,
            size_bytes=object_id.size_bytes,
        )
    _refuse(
        f"its length field claims {header_bytes - LENGTH_BYTES} bytes, more than the object's "
        f"{object_id.size_bytes}",
        prefix,
        object_id,
    )


def _check_size(expected_bytes: int, object_id: ObjectId) -> None:
    if object_id.size_bytes < expected_bytes:
        raise ShardTruncatedError(
            f"{object_id.uri} is cut short: its header describes {expected_bytes} bytes, the "
            f"object has {object_id.size_bytes}",
            hint=_COPY_AGAIN,
            expected_bytes=expected_bytes,
            size_bytes=object_id.size_bytes,
        )
    if object_id.size_bytes > expected_bytes:
        raise HeaderInvalidError(
            f"{object_id.uri} is not a valid safetensors file: "
            f"{object_id.size_bytes - expected_bytes} bytes follow the last tensor",
            hint=_WRITE_AGAIN,
            expected_bytes=expected_bytes,
            size_bytes=object_id.size_bytes,
        )


def _parse_text(text: bytes) -> tuple[dict[str, str], list[tuple[str, _Info]]]:
    """Return the metadata and the tensors in order of their offsets.

    Raises:
        ValueError: not what the format says.
    """
    document = text.decode("utf-8")
    # Most files are spelled the way the reference writes them; checking their entries inside the
    # parser takes a third of the time. All others are parsed again, as they stand.
    pairs = parse_json(document, _usual_entry)
    if not _is_usual(pairs):
        pairs = parse_json(document)
    if not isinstance(pairs, tuple):
        raise ValueError(f"expected a JSON object, got {_kind(pairs)}")
    metadata: dict[str, str] | None = None
    infos: dict[str, _Info] = {}
    for name, value in pairs:
        if name == _METADATA:
            if metadata is not None:
                raise ValueError(f"{_METADATA} stands there twice")
            metadata = _metadata(value)
        else:
            # A repeated name replaces the earlier one, which must be well-formed all the same.
            infos[name] = value if _is_info(value) else _info(name, value)
    # Stable: of several empty tensors at one place the file's order stays.
    return metadata or {}, sorted(infos.items(), key=lambda item: item[1][2:])


def _usual_entry(pairs: Pairs) -> tuple[Any, ...]:
    """Turn an entry of usual spelling into an `_Info`, leave any other object as its pairs."""
    if len(pairs) == 3:
        (key0, dtype), (key1, shape), (key2, offsets) = pairs
        if (
            key0 == "dtype"
            and key1 == "shape"
            and key2 == "data_offsets"
            and type(dtype) is str
            and dtype in DTYPE_BITS
            and _are_sizes(shape)
            and _are_sizes(offsets)
            and len(offsets) == 2
        ):
            return dtype, tuple(shape), offsets[0], offsets[1]
    return tuple(pairs)


def _is_info(value: Any) -> bool:
    # Pairs begin with a pair, an `_Info` with its dtype.
    return type(value) is tuple and len(value) == 4 and type(value[0]) is str


def _is_usual(pairs: Any) -> bool:
    """Whether `_usual_entry` turned every entry, and nothing else, into an `_Info`."""
    if type(pairs) is not tuple or _is_info(pairs):
        return False
    return all(_is_info(value) != (name == _METADATA) for name, value in pairs)


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, tuple):
        raise ValueError(f"{_METADATA} is {_kind(value)}, not an object")
    metadata = dict(value)
    for key, item in value:
        if not isinstance(item, str):
            raise ValueError(f"{_METADATA} {short(key)} is {_kind(item)}, not a string")
    return metadata


def _info(name: str, value: Any) -> _Info:
    fields = _fields(name, value)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if isinstance(dtype, tuple) and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # {"F32": null} is an odd spelling that the reference takes
    if not isinstance(dtype, str):
        raise ValueError(f"tensor {short(name)}: dtype is {_kind(dtype)}, not a string")
    if dtype not in DTYPE_BITS:
        raise ValueError(
            f"tensor {short(name)}: unknown dtype {short(dtype)} (known: {', '.join(DTYPE_BITS)})"
        )
    if not _are_sizes(shape):
        raise ValueError(f"tensor {short(name)}: shape is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {short(name)}: data_offsets are not two sizes")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _fields(name: str, value: Any) -> dict[str, Any]:
    """The entry as a dict with at least the three fields."""
    if isinstance(value, list) and len(value) == len(_FIELDS):
        return dict(zip(_FIELDS, value, strict=True))  # the reference takes this spelling too
    if not isinstance(value, tuple):
        raise ValueError(f"tensor {short(name)}: the entry is {_kind(value)}, not an object")
    fields = dict(value)
    for required in _FIELDS:
        if required not in fields:
            raise ValueError(f"tensor {short(name)}: no {required}")
    if len(value) != len(_FIELDS):
        for required in _FIELDS:
            if sum(key == required for key, _ in value) > 1:
                raise ValueError(f"tensor {short(name)}: {required} stands there twice")
        for _, extra in value:
            check_limits(extra, outer_depth=2)
    return fields


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of unsigned 64-bit integers (true and 1.0 are none)."""
    if type(value) is not list:
        return False
    for item in value:  # noqa: SIM110 - a generator costs half of the whole parse
        if type(item) is not int or not 0 <= item <= _U64_MAX:
            return False
    return True


def _check_layout(infos: list[tuple[str, _Info]]) -> int:
    """Check that the tensors cover the data without hole or overlap; return its length.

    Raises:
        ValueError: they do not, or a length does not fit its shape and dtype.
    """
    position = 0
    for name, (dtype, shape, start, end) in infos:
        if start != position or end < start:
            problem = "overlaps the one before" if start < position else "leaves a hole"
            if end < start:
                problem = "ends before it begins"
            raise ValueError(f"tensor {short(name)} at [{start}, {end}) {problem}")
        position = end
        bits = DTYPE_BITS[dtype]
        elements = 1
        for size in shape:
            elements *= size
            # Checked at each step as the reference does: a later 0 does not save it.
            if elements > _U64_MAX:
                break
        if elements > _U64_MAX or elements * bits > _U64_MAX:
            raise ValueError(f"tensor {short(name)}: shape {short(shape)} overflows 64 bits")
        if elements * bits != (end - start) * 8:
            raise ValueError(
                f"tensor {short(name)}: {dtype} of shape {short(shape)} takes {elements * bits} "
                f"bits, its range [{start}, {end}) holds {(end - start) * 8}"
            )
    return position


def _kind(value: Any) -> str:
    for kind, word in (
        (bool, "a boolean"),
        (str, "a string"),
        (list, "an array"),
        (tuple, "an object"),
    ):
        if isinstance(value, kind):
            return word
    return "null" if value is None else "a number"
