"""Trees as engines leave them, factors, keys: what the tests of the compile cache share."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastload_common.compile_cache.bundle import Packing, pack
from fastload_common.compile_cache.manifest import encode_manifest
from fastload_common.compile_cache.stores.base import Package
from fastload_common.compile_cache.trust import Keys

FACTORS: dict[str, Any] = {
    "engine.name": "engine",
    "engine.version": "1.2.3",
    "model.content": {"config.json": "0" * 64},
    "dtype.model": "bfloat16",
    "layout.tensor": 1,
    "software.torch": "2.13.0+cpu",
    "software.python": "CPython 3.11.7",
    "software.libc": "glibc 2.36",
    "hardware.kind": "cpu",
    "hardware.machine": "x86_64",
    "hardware.cpu_isa": ["avx2", "avx512f"],
}

Tree = dict[str, bytes]

TREES: dict[str, Tree] = {
    "inductor": {
        "ab/cab.py": b"def call(args):\n    return args\n" * 40,
        "ab/cab.so": bytes(range(256)) * 50,
        "fxgraph/zz/graph": b"\x80\x04graph" * 100,
        "empty": b"",
    },
    "triton": {"k/kernel.cubin": b"\x7fELF" + bytes(3000), "k/kernel.json": b"{}"},
}


def write_trees(directory: Path, trees: Mapping[str, Tree] = TREES) -> dict[str, Path]:
    """Write trees below a directory; root -> its directory."""
    roots = {}
    for root, tree in trees.items():
        roots[root] = directory / root
        roots[root].mkdir(parents=True, exist_ok=True)
        for name, data in tree.items():
            path = directory / root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o755 if name.endswith(".so") else 0o644)
            os.utime(path, ns=(10**18, 10**18 + len(data)))
    return roots


def read_trees(roots: Mapping[str, Path]) -> dict[str, Tree]:
    """What stands there now."""
    return {
        root: {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        for root, directory in roots.items()
    }


def package(
    roots: Mapping[str, Path],
    factors: Mapping[str, Any] = FACTORS,
    keys: Keys | None = None,
    how: Packing | None = None,
) -> Package:
    """Pack in memory."""
    blob = io.BytesIO()
    manifest = pack(factors, roots, blob, how)
    blob.seek(0)
    return Package(manifest, encode_manifest(manifest, keys), blob)


def write_keys(directory: Path) -> tuple[Path, Path]:
    """A new private key's file and its public one's."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    files = directory / "private.pem", directory / "public.pem"
    files[0].write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    files[1].write_bytes(
        private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return files
