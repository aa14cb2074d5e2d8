"""A catalogue of odd and hostile safetensors files, and whether a reader must take them.

``accepted`` is what the reference reader does (checked by a test), so any other reader can be held
to the catalogue without it.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastload_common.checkpoint.dtypes import DTYPE_BITS
from fastload_common.testing.checkpoints import (
    TensorSpec,
    encode_file,
    encode_header,
    random_tensor,
)

__all__ = ["HostileFile", "foreign_files", "hostile_files", "raw_file"]

_ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
_TENSOR = f'"a":{_ENTRY}'


@dataclass(frozen=True, slots=True)
class HostileFile:
    """One file.

    Attributes:
        name: unique in the catalogue; fit for a test's id.
        data: the whole file.
        accepted: whether a reader must take it.
        looks: a word that the error must hold (for files of another kind).
    """

    name: str
    data: bytes
    accepted: bool
    looks: str = ""


def hostile_files() -> list[HostileFile]:
    """The whole catalogue; each file is small."""
    return [
        *layouts(),
        *dtypes(),
        *odd_headers(),
        *odd_entries(),
        *odd_text(),
        *odd_numbers(),
        *foreign_files(),
    ]


def raw_file(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header text, right or wrong, and perhaps a wrong length field."""
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype: str, shape: Any, start: int, end: int, **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **extra}


def layouts() -> Iterator[HostileFile]:
    """Where tensors lie, and the file's length."""
    four, eight = b"\1\2\3\4", b"\1\2\3\4\5\6\7\x08"
    a, b = _entry("F32", [1], 0, 4), _entry("F32", [1], 4, 8)
    empty = {f"e{i}": random_tensor("F16", shape) for i, shape in enumerate([[0], [0, 9], [9, 0]])}
    full = {"x": random_tensor("F32", [3]), "y": random_tensor("BF16", [2, 2])}
    good = encode_file(full)
    for name, entries, data, accepted in (
        ("two tensors", {"a": a, "b": b}, eight, True),
        ("entries not in offset order", {"b": b, "a": a}, eight, True),
        ("trailing byte", {"a": a}, four + b"\0", False),
        ("trailing page", {"a": a}, four + bytes(4096), False),
        ("one byte short", {"a": a}, four[:3], False),
        ("no data at all", {"a": a}, b"", False),
        ("hole at the start", {"b": b}, eight, False),
        ("hole in the middle", {"a": a, "b": _entry("F32", [1], 5, 9)}, eight + b"\0", False),
        ("overlap", {"a": a, "b": _entry("F32", [1], 2, 6)}, eight[:6], False),
        ("same bytes twice", {"a": a, "b": a}, four, False),
        ("end before start", {"a": _entry("F32", [1], 4, 0)}, four, False),
        ("empty tensor inside another", {"a": a, "b": _entry("F32", [0], 2, 2)}, four, False),
        ("shape too large for range", {"a": _entry("F32", [2], 0, 4)}, four, False),
        ("shape too small for range", {"a": _entry("F32", [1], 0, 8)}, eight, False),
        ("unaligned data", {"u": _entry("U8", [3], 0, 3), "f": _entry("F32", [1], 3, 7)},
         eight[:7], True),
        ("unknown extra fields", {"a": _entry("F32", [1], 0, 4, x=[{"y": None}], z=1.5)},
         four, True),
        ("scalar", {"a": _entry("F32", [], 0, 4)}, four, True),
        ("three tensors named like fields", {"dtype": a, "shape": b,
         "data_offsets": _entry("F32", [0], 8, 8)}, eight, True),
        ("odd names", {"": a, "ü 名 \U0001f600/../ \"\\\n\0": b}, eight, True),
        ("header that is an entry", a, four, False),
    ):  # fmt: skip
        yield HostileFile(name, encode_header(entries) + data, accepted)
    yield HostileFile("empty tensors first", encode_file({**empty, **full}), True)
    yield HostileFile("empty tensors last", encode_file({**full, **empty}), True)
    yield HostileFile("only empty tensors", encode_file(empty), True)
    yield HostileFile("header cut", good[:40], False)
    yield HostileFile("only the length field", good[:8], False)
    for extra in range(8):
        text = json.dumps({"a": a}).encode()
        text += b" " * ((extra - len(text)) % 8)
        yield HostileFile(f"header length 8k+{extra}", raw_file(text, four), True)


def dtypes() -> Iterator[HostileFile]:
    """One file for each dtype, and wrong ones."""
    for dtype in DTYPE_BITS:
        yield HostileFile(f"dtype {dtype}", encode_file({"a": random_tensor(dtype, [2, 8])}), True)
    for name, spec in {
        "F4 odd count": TensorSpec("F4", (3,), b"\0\0"),
        "F6 not a whole byte": TensorSpec("F6_E2M3", (2,), b"\0\0"),
        "dtype F7": TensorSpec("F7", (8,), b"\0" * 7),
        "dtype in lower case": TensorSpec("f32", (1,), b"\0" * 4),
        "dtype empty": TensorSpec("", (1,), b"\0" * 4),
    }.items():
        yield HostileFile(name, encode_file({"a": spec}), False)


def odd_headers() -> Iterator[HostileFile]:
    """The header as a whole, and its metadata."""
    entry, tensor = _ENTRY, _TENSOR
    for name, text, size_bytes, accepted in (
        ("header {}", "{}", 0, True),
        ("header empty", "", 0, False),
        ("header of spaces", "   ", 0, False),
        ("header null", "null", 0, False),
        ("header array", "[]", 0, False),
        ("header string", '"a"', 0, False),
        ("header twice", "{}{}", 0, False),
        ("header with NUL padding", "{}\0\0", 0, False),
        ("header with byte order mark", "\ufeff{}", 0, False),
        ("header not closed", '{"a":', 0, False),
        ("spaces around", " \n\t\r{" + tensor + "} \n\t\r ", 4, True),
        ("only metadata", '{"__metadata__":{"format":"pt"}}', 0, True),
        ("metadata null", '{"__metadata__":null}', 0, True),
        ("metadata empty", '{"__metadata__":{},' + tensor + "}", 4, True),
        ("metadata with a number", '{"__metadata__":{"a":1}}', 0, False),
        ("metadata with null", '{"__metadata__":{"a":null}}', 0, False),
        ("metadata with an object", '{"__metadata__":{"a":{}}}', 0, False),
        ("metadata array", '{"__metadata__":[]}', 0, False),
        ("metadata string", '{"__metadata__":"a"}', 0, False),
        ("metadata twice", '{"__metadata__":{},"__metadata__":{}}', 0, False),
        ("metadata like a tensor", f'{{"__metadata__":{entry}}}', 4, False),
        ("metadata key twice", '{"__metadata__":{"a":"b","a":"c"}}', 0, True),
    ):
        yield HostileFile(name, raw_file(text, bytes(size_bytes)), accepted)


def odd_entries() -> Iterator[HostileFile]:
    """Spellings of a tensor's entry."""
    tensor = _TENSOR
    other = '{"dtype":"F32","shape":[7],"data_offsets":[9,3]}'
    for name, text, size_bytes, accepted in (
        ("tensor twice, the same", f"{{{tensor},{tensor}}}", 4, True),
        ("tensor twice, last is wrong", f'{{{tensor},"a":{other}}}', 4, False),
        ("tensor twice, last is right", f'{{"a":{other},{tensor}}}', 4, True),
        ("tensor twice, first has no dtype", '{"a":{},' + tensor + "}", 4, False),
        ("tensor null", '{"a":null}', 0, False),
        ("tensor string", '{"a":"F32"}', 0, False),
        ("tensor without fields", '{"a":{}}', 0, False),
        ("tensor as array", '{"a":["F32",[1],[0,4]]}', 4, True),
        ("tensor as short array", '{"a":["F32",[1]]}', 4, False),
        ("tensor as long array", '{"a":["F32",[1],[0,4],0]}', 4, False),
        ("dtype as object", tensor_with('"dtype":"F32"', '"dtype":{"F32":null}'), 4, True),
        ("dtype as full object", tensor_with('"dtype":"F32"', '"dtype":{"F32":1}'), 4, False),
        ("dtype as number", tensor_with('"F32"', "17"), 4, False),
        ("dtype twice", tensor_with('"dtype":"F32"', '"dtype":"F32","dtype":"F32"'), 4, False),
        ("shape twice", tensor_with('"shape":[1]', '"shape":[1],"shape":[1]'), 4, False),
        ("no shape", tensor_with('"shape":[1],', ""), 4, False),
        ("no offsets", tensor_with(',"data_offsets":[0,4]', ""), 4, False),
        ("shape null", tensor_with("[1]", "null"), 4, False),
        ("shape object", tensor_with("[1]", "{}"), 4, False),
        ("shape string", tensor_with("[1]", '"1"'), 4, False),
        ("shape nested", tensor_with("[1]", "[[1]]"), 4, False),
        ("offsets of one", tensor_with("[0,4]", "[4]"), 4, False),
        ("offsets of three", tensor_with("[0,4]", "[0,4,4]"), 4, False),
        ("extra field twice", tensor_with('"shape"', '"x":1,"x":2,"shape"'), 4, True),
        ("fields in another order", tensor_with('"dtype":"F32",', "")[:-2] + ',"dtype":"F32"}}',
         4, True),
        ("field name with escape", tensor_with('"dtype"', '"d\\u0074ype"'), 4, True),
    ):  # fmt: skip
        yield HostileFile(name, raw_file(text, bytes(size_bytes)), accepted)


def odd_text() -> Iterator[HostileFile]:
    """Strings, encodings and nesting."""
    entry, tensor = _ENTRY, _TENSOR
    deep = entry[:-1] + ',"x":%s}'
    for name, text, size_bytes, accepted in (
        ("name with surrogate pair", tensor_with('"a"', '"\\ud83d\\ude00"'), 4, True),
        ("name with lone surrogate", tensor_with('"a"', '"\\ud83d"'), 4, False),
        ("name with lone trailing surrogate", tensor_with('"a"', '"\\udc00"'), 4, False),
        ("name with swapped surrogates", tensor_with('"a"', '"\\ude00\\ud83d"'), 4, False),
        ("surrogate in a field nobody reads", tensor_with('"shape"', '"x":"\\ud800","shape"'),
         4, False),
        ("escaped backslash before ud800", tensor_with('"a"', '"\\\\ud800"'), 4, True),
        ("wrong escape", tensor_with('"a"', '"\\x41"'), 4, False),
        ("control character in name", tensor_with('"a"', '"a\x01"'), 4, False),
        ("trailing comma", f"{{{tensor},}}", 4, False),
        ("single quotes", tensor_with('"a"', "'a'"), 4, False),
        ("comment", f"{{{tensor}/* */}}", 4, False),
        ("nested to the limit", '{"a":' + deep % ("[" * 125 + "]" * 125) + "}", 4, True),
        ("nested beyond the limit", '{"a":' + deep % ("[" * 126 + "]" * 126) + "}", 4, False),
        ("objects nested to the limit", '{"a":' + deep % ('{"k":' * 125 + "1" + "}" * 125) + "}",
         4, True),
        ("objects nested beyond", '{"a":' + deep % ('{"k":' * 126 + "1" + "}" * 126) + "}",
         4, False),
        ("nested very deeply", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", 0, False),
        ("nested very deeply, not closed", "[" * 1_000_000, 0, False),
    ):  # fmt: skip
        yield HostileFile(name, raw_file(text, bytes(size_bytes)), accepted)
    for name, raw in (
        ("name that is not UTF-8", b'{"a\xff":' + entry.encode() + b"}"),
        ("name with encoded surrogate", b'{"a\xed\xa0\x80":' + entry.encode() + b"}"),
        ("header in UTF-16", f"{{{tensor}}}".encode("utf-16-le")),
    ):
        yield HostileFile(name, raw_file(raw, bytes(4)), accepted=False)


def odd_numbers() -> Iterator[HostileFile]:
    """Numbers in shape, offsets and elsewhere, and the length field."""
    for name, old, new, size_bytes, accepted in (
        ("shape float", "[1]", "[1.0]", 4, False),
        ("shape exponent", "[1]", "[1e0]", 4, False),
        ("shape boolean", "[1]", "[true]", 4, False),
        ("shape string number", "[1]", '["1"]', 4, False),
        ("shape leading zero", "[1]", "[01]", 4, False),
        ("shape plus", "[1]", "[+1]", 4, False),
        ("shape negative", "[1]", "[-1]", 4, False),
        ("shape many ones", "[1]", "[" + "1," * 5000 + "1]", 4, True),
        ("shape minus zero", "[1]", "[-0]", 0, False),
        ("offset minus zero", "[0,4]", "[-0,4]", 4, False),
        ("offset negative", "[0,4]", "[-4,0]", 4, False),
        ("offset 2^64", "[0,4]", f"[0,{2**64}]", 4, False),
        ("offset 2^64-1", "[0,4]", f"[0,{2**64 - 1}]", 4, False),
        ("offset 2^63", "[0,4]", f"[0,{2**63}]", 4, False),
        ("extra NaN", '"shape"', '"x":NaN,"shape"', 4, False),
        ("extra Infinity", '"shape"', '"x":-Infinity,"shape"', 4, False),
        ("extra minus zero", '"shape"', '"x":-0,"shape"', 4, True),
        ("extra 1e999", '"shape"', '"x":1e999,"shape"', 4, False),
        ("extra nested 1e999", '"shape"', '"x":[{"y":1e999}],"shape"', 4, False),
        ("extra 1e-999", '"shape"', '"x":1e-999,"shape"', 4, True),
        ("extra of 100 digits", '"shape"', f'"x":{"9" * 100},"shape"', 4, True),
        ("extra of 400 digits", '"shape"', f'"x":[{"9" * 400}],"shape"', 4, False),
        ("extra of 10000 digits", '"shape"', f'"x":{"9" * 10_000},"shape"', 4, False),
    ):
        yield HostileFile(name, raw_file(tensor_with(old, new), bytes(size_bytes)), accepted)
    for name, dtype, shape, accepted in (
        ("product overflows before a zero", "F32", [2**63, 4, 0], False),
        ("zero before a product that would overflow", "F32", [0, 2**63, 4], True),
        ("bits overflow", "F32", [2**62], False),
        ("bits overflow to nothing", "F4", [2**62], False),
        ("size 2^64", "F32", [0, 2**64], False),
    ):
        yield HostileFile(name, encode_header({"a": _entry(dtype, shape, 0, 0)}), accepted)
    for name, length in (
        ("length 0", 0),
        ("length one too small", 1),
        ("length beyond the file", 3),
        ("length at the limit, file is small", 100_000_000),
        ("length above the limit", 100_000_001),
        ("length 2^62", 2**62),
        ("length 2^64-8", 2**64 - 8),
        ("length 2^64-1", 2**64 - 1),
    ):
        yield HostileFile(name, raw_file("{}", length=length), accepted=False)


def foreign_files() -> Iterator[HostileFile]:
    """Files of another kind under a safetensors name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\n"
    pointer += b"size 988097824\n"
    for name, data, looks in (
        ("Git-LFS pointer", pointer, "Git-LFS"),
        ("HTML page", b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "HTML"),
        ("XML error", b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>x</Code>', "XML"),
        ("zip archive", packed.getvalue(), "zip"),
        ("pickle", b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01u." + bytes(40), "pickle"),
        ("gzip archive", gzip.compress(bytes(range(200)) * 4, mtime=0), "gzip"),
        ("GGUF", b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + bytes(64), "GGUF"),
        ("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5"),
        ("tar archive", b"model.bin".ljust(257, b"\0") + b"ustar\x0000" + bytes(248), "tar"),
        ("JSON without length", b'{"a":{"dtype":"F32"}}', "text that begins with"),
        ("link of a hub cache as text", b"../../blobs/" + b"0" * 64, "symbolic link"),
        ("empty file", b"", "empty"),
        ("3 bytes", b"{}\n", "text"),
        ("3 zero bytes", bytes(3), "zeros"),
        ("8 zero bytes", bytes(8), "zeros"),
        ("a page of zeros", bytes(4096), "zeros"),
    ):
        yield HostileFile(name, data, accepted=False, looks=looks)


def tensor_with(old: str, new: str) -> str:
    """The header text of one F32 tensor ``a`` at [0, 4), with one piece replaced."""
    text = f"{{{_TENSOR}}}"
    if old not in text:
        raise ValueError(f"{old!r} is not in {text}")
    return text.replace(old, new)
