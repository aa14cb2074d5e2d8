"""Where this process may keep small files: the first writable place, never ``/``, never weights.

Needs no passwd entry and no HOME. Knows directories; what goes into them is others' business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from fastload_common.config import Settings, environment

__all__ = ["cache_roots", "private_directory", "temporary_root"]


def cache_roots(settings: Settings, environ: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Yield the places to try, best first; none is created here.

    ``cache_dir`` where it is set, else ``$XDG_CACHE_HOME/fastload``, else ``~/.cache/fastload``
    if there is a home that is not the file system's root. Last, a directory of this user under
    ``$TMPDIR``.
    """
    environ = environment() if environ is None else environ
    if settings.cache_dir is not None:
        yield _absolute(settings.cache_dir, environ)
    else:
        explicit = environ.get("XDG_CACHE_HOME", "")
        home = _home(environ)
        # The specification says that a relative one is to be ignored.
        if os.path.isabs(explicit):
            yield Path(explicit) / "fastload"
        elif home is not None:
            yield home / ".cache" / "fastload"
    yield temporary_root(environ)


def temporary_root(environ: Mapping[str, str] | None = None) -> Path:
    """This user's directory under ``$TMPDIR`` (``/tmp``)."""
    environ = environment() if environ is None else environ
    base = environ.get("TMPDIR", "")
    return Path(base if os.path.isabs(base) else "/tmp") / f"fastload-{os.geteuid()}"


def private_directory(path: Path) -> None:
    """Create a directory for this user alone, or check that an existing one is such.

    Needed under a directory that everybody can write: the files may be code that is imported.

    Raises:
        OSError: it cannot be created, or belongs to somebody else, or is a link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        state = path.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid():
            raise PermissionError(f"{path} is not a directory of this user") from None
        if state.st_mode & 0o022:
            raise PermissionError(f"{path} can be written by other users") from None


def _absolute(path: Path, environ: Mapping[str, str]) -> Path:
    text = str(path)
    home = _home(environ)
    if home is not None and (text == "~" or text.startswith("~/")):
        return home / text[2:]
    return Path(os.path.abspath(text))


def _home(environ: Mapping[str, str]) -> Path | None:
    """The home directory, or None: no HOME and no passwd entry, relative, or the root."""
    text = environ.get("HOME", "")
    if not text:
        import pwd

        try:
            text = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    if not os.path.isabs(text) or os.path.realpath(text) == os.sep:
        return None
    return Path(text)
