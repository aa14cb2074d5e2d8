"""`OSError` of a file to our errors. The only place that knows which errno means what."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fastload_common.errors import (
    AccessDeniedError,
    ObjectMissingError,
    SourceError,
    SourceUnavailableError,
)
from fastload_common.source.uri import file_uri

__all__ = ["file_error"]

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}

# Network file systems and exhausted descriptors: asking again may help.
_PASSING = {
    errno.EAGAIN,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOMEM,
}


def file_error(error: OSError, path: Path, doing: str) -> SourceError:
    """The error to raise for an `OSError` on this path.

    Args:
        doing: the verb for the message: ``list``, ``stat``, ``open``, ``read``, ``write``.
    """
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    uri = file_uri(path)
    if number in _MISSING:
        what, hint = _explain_missing(path, number, doing)
        return ObjectMissingError(what, hint=hint, uri=uri, errno=name)
    if number in _DENIED:
        return AccessDeniedError(
            f"not allowed to {doing} {path}",
            hint=f"this process runs as uid {os.geteuid()}; check the modes of it and its parents",
            uri=uri,
            errno=name,
        )
    if number in _PASSING:
        hint = "raise the limit of open files (ulimit -n)" if number == errno.EMFILE else ""
        return SourceUnavailableError(
            f"could not {doing} {path}: {error.strerror}", hint=hint, uri=uri, errno=name
        )
    return SourceError(f"could not {doing} {path}: {error.strerror}", uri=uri, errno=name)


def _explain_missing(path: Path, number: int, doing: str) -> tuple[str, str]:
    if number == errno.EISDIR:
        return f"{path} is a directory, where a file was asked for", ""
    if number == errno.ENOTDIR:
        return f"{path}: a part of it is a file, where a directory was expected", ""
    if os.path.islink(path):
        target = os.readlink(path)
        if number == errno.ELOOP:
            return f"{path} is a link in a loop of links (to {target})", "make the link anew"
        return (
            f"{path} is a dangling link: its target {target} is not there",
            "the download was not finished, or links were copied without what they lead to",
        )
    if number == errno.ELOOP:
        return f"{path}: a part of it is in a loop of links", ""
    if doing == "list":
        return f"no such directory: {path}", "a model is named by s3://, file:// or a directory"
    return f"no such file: {path}", ""
