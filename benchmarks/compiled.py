"""Builds the small C programs beside this file on demand, and runs the range server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import TracebackType

__all__ = ["RangeServer", "build", "find_compiler", "word_at"]

_SOURCES = Path(__file__).parent / "native"
_GOLDEN = 0x9E3779B97F4A7C15


def find_compiler() -> str | None:
    """A C compiler on the path, if there is one."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def build(name: str, directory: Path) -> Path:
    """Compile ``native/<name>.c`` into the directory; the program's path.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its output is in ``stderr``.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler")
    program = directory / name
    subprocess.run(
        [compiler, "-O2", "-o", program, _SOURCES / f"{name}.c", "-lpthread"],
        check=True,
        capture_output=True,
        text=True,
    )
    return program


def word_at(offset: int) -> int:
    """The object's 64-bit word at a multiple of 8 bytes (see range_server.c)."""
    return offset // 8 * _GOLDEN % 2**64


class RangeServer:
    """One object in memory behind HTTP, in a process of its own that ends with this one.

    Attributes:
        port: on 127.0.0.1, once entered.
    """

    def __init__(self, program: Path, object_bytes: int) -> None:
        self._command = [str(program), str(object_bytes)]
        self.port = 0

    def __enter__(self) -> RangeServer:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Its standard input closes: the server exits by itself.
        self._process.communicate()
