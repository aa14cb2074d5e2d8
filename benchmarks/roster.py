"""Who is measured, with which settings, and how much work each gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.measure import missing

__all__ = ["PEERS", "VARIANTS", "Peer", "present", "shown"]

_RUNAI = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}


@dataclass(frozen=True, slots=True)
class Peer:
    """One client with its settings.

    Attributes:
        client: a module in `benchmarks.clients`, or ``floor``.
        about: what a reader of the results must know.
        share: part of the objects that it receives, so that slow clients do not take for ever.
        options: for the client; ``environment`` holds variables.
        connections, chunk_bytes: None: what all get; 0: it chooses by itself.
    """

    client: str
    about: str
    share: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    connections: int | None = None
    chunk_bytes: int | None = None


def _runai(owned: bool, **variables: str) -> dict[str, Any]:
    named = {f"RUNAI_STREAMER_{name}": value for name, value in variables.items()}
    return {"environment": _RUNAI | named, "owned": owned}


PEERS: dict[str, Peer] = {
    "C floor": Peer("floor", "recv or SSL_read into touched buffers, unsigned"),
    "fastload": Peer(
        "fastload",
        "source, signing, fetcher and staging memory; chunks of its own choice for a model of this "
        "size and so many connections: 16 MiB",
        chunk_bytes=0,
    ),
    "fastload 8 MiB": Peer("fastload", "the same with 8 MiB chunks"),
    "fastload defaults": Peer(
        "fastload", "connections and chunks of its own choice", connections=0, chunk_bytes=0
    ),
    "libcurl": Peer("curl", "through ctypes in threads, unsigned: the other way to fetch", 0.5),
    "boto3": Peer("boto", "get_object in threads, readinto touched memory", 0.5),
    "awscrt": Peer("crt", "S3Client, parts copied to touched memory", 0.5),
    "obstore": Peer("obstore_ranges", "get_range_async, copied to touched memory", 0.5),
    "s5cmd": Peer(
        "s5", "cp to files in memory, whole process, fresh memory; files not in its peak", 0.5
    ),
    "runai": Peer(
        "runai", "SafetensorsStreamer to the CPU, its defaults, fresh memory", 0.5, _runai(True)
    ),
    "runai tuned": Peer(
        "runai",
        "its documents' best for S3: 32 connections, 8 MiB chunks, memory limit that re-uses; "
        "and 100 Gbit/s as target",
        0.5,
        _runai(
            False,
            CONCURRENCY="32",
            CHUNK_BYTESIZE=str(8 << 20),
            MEMORY_LIMIT=str(256 << 20),
            S3_TARGET_GBPS="100",
        ),
    ),
    "runai lean": Peer(
        "runai",
        "least CPU found here: 2 clients, 64 MiB limit",
        0.5,
        _runai(False, CONCURRENCY="2", MEMORY_LIMIT=str(64 << 20)),
    ),
}

VARIANTS = ("fastload 8 MiB", "fastload defaults")
"""Of fastload, for `benchmarks.peers`; elsewhere one row of it is enough."""


def present(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Those that can run here, and why the others cannot."""
    absent = {name: why for name in names if (why := missing(PEERS[name].client))}
    return [name for name in names if name not in absent], absent


def shown(names: list[str]) -> dict[str, str]:
    """What each is, for the results."""
    return {name: PEERS[name].about for name in names}
