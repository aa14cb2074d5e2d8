"""The rig's command line: objects, faults and limits from options."""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastload_common.errors import ConfigError
from fastload_common.testing.rig.effects import FirstByte, Lognormal, Rate, Slower, Stall
from fastload_common.testing.rig.fault_json import load_faults
from fastload_common.testing.rig.faults import Fault
from fastload_common.testing.rig.objects import Content, Generated
from fastload_common.testing.rig.server import Rig
from fastload_common.testing.rig.sigv4 import AccessKey
from fastload_common.units import parse_size

__all__ = ["MappedFile", "faults_of", "make_rig", "parser"]


class MappedFile:
    """A file's bytes, as they come from the page cache."""

    def __init__(self, path: Path) -> None:
        self.size_bytes = path.stat().st_size
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            self._data = memoryview(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size_bytes else b""
            )

    def pieces(self, start: int, end: int, piece_bytes: int) -> Iterator[memoryview]:
        for at in range(start, end, piece_bytes):
            yield self._data[at : min(at + piece_bytes, end)]


def parser() -> argparse.ArgumentParser:
    """The options; all have a default."""
    found = argparse.ArgumentParser(
        prog="python -m fastload_common.testing.rig",
        description="Serve objects over S3 on a free loopback port, with faults. Prints one line "
        "of JSON (port, endpoint, environ) and ends when its standard input closes. Lines on its "
        "input (stats, log, clear, release, faults <JSON>, link <bytes/s>) are answered with one "
        "line of JSON each.",
    )
    add = found.add_argument
    add("--bucket", default="models", help="bucket of --directory (default: models)")
    add("--directory", type=Path, help="serve all files below it; keys are their relative paths")
    add(
        "--object",
        action="append",
        default=[],
        metavar="BUCKET/KEY=SIZE[:SEED]",
        help="a generated object, such as models/a=4GiB:7; may be given several times",
    )
    add("--faults", type=Path, metavar="FILE", help="a JSON list of faults")
    add("--first-byte-ms", type=float, default=0.0, help="of every GET; the median with a sigma")
    add("--first-byte-sigma", type=float, default=0.0, help="of a lognormal first-byte latency")
    add("--connection-bytes-per-s", type=parse_size, help="rate of each body, such as 90MB")
    add("--link-bytes-per-s", type=parse_size, help="limit of all bodies together")
    add("--slow-share", type=float, default=0.0, help="share of GETs that are slower")
    add("--slow-factor", type=float, default=3.0, help="by how much")
    add("--stall-share", type=float, default=0.0, help="share of GETs that stall for ever")
    add("--seed", type=int, default=0, help="of all choices")
    add("--access-key", default="RIGACCESSKEY")
    add("--secret-key", default="rig-secret-key")
    add("--allow-unsigned", action="store_true")
    add("--page-keys", type=int, default=1000)
    add("--region", default="us-east-1")
    add(
        "--tls-directory",
        type=Path,
        help="HTTPS with a certificate of an authority made there; the bundle is printed",
    )
    return found


def faults_of(options: argparse.Namespace) -> list[Fault]:
    """The faults that the options ask for.

    Raises:
        ConfigError: the file holds something else.
    """
    found: list[Fault] = []
    seed: int = options.seed
    if options.first_byte_ms:
        median_s = options.first_byte_ms / 1000
        sigma = options.first_byte_sigma
        wait = FirstByte(Lognormal(median_s, sigma) if sigma else median_s)
        found.append(Fault(wait, seed=seed))
    if options.connection_bytes_per_s:
        found.append(Fault(Rate(options.connection_bytes_per_s)))
    if options.slow_share:
        slower = Slower(options.slow_factor)
        found.append(Fault(slower, share=options.slow_share, seed=seed))
    if options.stall_share:
        # Half of them before the head, half in the middle of the body.
        for stall in (Stall(after_bytes=None), Stall(after_share=0.5)):
            found.append(Fault(stall, share=options.stall_share / 2, seed=seed))
    if options.faults is not None:
        found += load_faults(options.faults.read_text())
    return found


def make_rig(options: argparse.Namespace) -> tuple[Rig, dict[str, str]]:
    """A rig that is not started, and further variables for its clients.

    Raises:
        ConfigError: an option that does not fit.
    """
    tls, more = None, {}
    if options.tls_directory is not None:
        from fastload_common.testing.certificates import PrivateAuthority

        authority = PrivateAuthority(options.tls_directory)
        tls = authority.server_context("127.0.0.1", "localhost", "*.s3.localhost")
        more["AWS_CA_BUNDLE"] = str(authority.bundle)
    rig = Rig(
        keys=[AccessKey(options.access_key, options.secret_key)],
        tls=tls,
        link_bytes_per_s=options.link_bytes_per_s,
        page_keys=options.page_keys,
        region=options.region,
    )
    rig.allow_unsigned = options.allow_unsigned
    rig.faults = faults_of(options)
    rig.store.make_bucket(options.bucket)
    _put_directory(rig, options.bucket, options.directory)
    _put_generated(rig, options.object)
    return rig, more


def _put_directory(rig: Rig, bucket: str, directory: Path | None) -> None:
    if directory is None:
        return
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            content: Content = MappedFile(path)
            status = path.stat()
            etag = f'"{status.st_mtime_ns:016x}{status.st_size:016x}"'
            rig.put(bucket, path.relative_to(directory).as_posix(), content, etag=etag)


def _put_generated(rig: Rig, wanted: Sequence[str]) -> None:
    for text in wanted:
        name, equals, rest = text.partition("=")
        bucket, slash, key = name.partition("/")
        size, _, seed = rest.partition(":")
        if not equals or not slash or not key or (not seed.isdecimal() and seed):
            raise ConfigError(f"not an object: {text!r}", hint="write BUCKET/KEY=SIZE[:SEED]")
        rig.put(bucket, key, Generated(parse_size(size), int(seed or 0)))
