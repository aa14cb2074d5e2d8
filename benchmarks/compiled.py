"""Builds the small C programs beside this file on demand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["NO_COMPILER", "NO_TLS", "Programs", "build", "find_compiler"]

NO_COMPILER = "skipped: no C compiler (cc, gcc or clang)"
NO_TLS = "skipped TLS: no OpenSSL headers"

_SOURCES = Path(__file__).parent / "native"
_SERVER = ("s3_server.c", "content.c", "pace.c", "times.c", "wire.c")
_CLIENT = ("range_client.c",)


class Programs:
    """Paths of the built programs.

    Attributes:
        server, client: the store (s3_server.c) and the floor (range_client.c).
        tls: whether both know TLS.
    """

    def __init__(self, directory: Path, *, tls: bool) -> None:
        self.server = directory / "s3_server"
        self.client = directory / "range_client"
        self.tls = tls


def find_compiler() -> str | None:
    """A C compiler on the path, if there is one."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def build(directory: Path) -> Programs:
    """Compile everything into the directory, with TLS where OpenSSL's headers are installed.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its output is in ``stderr``.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(NO_COMPILER)
    programs = Programs(directory, tls=_has_openssl(compiler))
    options = ["-O2"]
    libraries = ["-lpthread"]
    if programs.tls:
        options.append("-DWITH_TLS")
        libraries += ["-lssl", "-lcrypto"]
    for program, names in ((programs.server, _SERVER), (programs.client, _CLIENT)):
        sources = [_SOURCES / name for name in names]
        subprocess.run(
            [compiler, *options, "-o", program, *sources, *libraries],
            check=True,
            capture_output=True,
            text=True,
        )
    return programs


def _has_openssl(compiler: str) -> bool:
    probe = subprocess.run(
        [compiler, "-E", "-x", "c", "-"],
        input="#include <openssl/ssl.h>\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return probe.returncode == 0
