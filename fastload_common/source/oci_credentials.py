"""What to say to a registry: the files that `docker login` and `podman login` write, and helpers.

Looked for, first found per registry wins: ``$REGISTRY_AUTH_FILE``, ``$DOCKER_CONFIG/config.json``
(or ``.dockerconfigjson`` there: a mounted pull secret), ``$XDG_RUNTIME_DIR/containers/auth.json``,
``~/.docker/config.json``. In each: the helper for the registry, ``auths``, then ``credsStore``.
Nothing here is ever shown or logged.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastload_common.errors import AccessDeniedError, ConfigError

__all__ = ["Credential", "RunHelper", "credential_files", "find_credential", "run_helper"]

_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_PATIENCE_S = 30.0
_LARGEST_FILE_BYTES = 1024 * 1024
_DOCKER_HUB = "docker.io"
_DOCKER_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io")
_IDENTITY_USER = "<token>"

RunHelper = Callable[[str, str], "tuple[int, bytes]"]
"""Takes a helper's program and a server's address; its exit code and what it printed."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What one registry is told. Secrets are not shown.

    Attributes:
        user, password: of basic authentication; empty where there is only a token.
        identity_token: what is exchanged for access tokens (OAuth2 refresh token).
        registry_token: an access token as it is.
        origin: where it was found, for messages: a file, or a helper.
    """

    origin: str
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str | None:
        """The Authorization header of basic authentication."""
        if not self.user:
            return None
        pair = f"{self.user}:{self.password}".encode()
        return "Basic " + base64.b64encode(pair).decode()


def credential_files(environ: Mapping[str, str]) -> list[Path]:
    """The files that are looked at, in this order; they need not exist."""
    files = []
    if path := environ.get("REGISTRY_AUTH_FILE"):
        files.append(Path(path).expanduser())
    if directory := environ.get("DOCKER_CONFIG"):
        files += [Path(directory) / "config.json", Path(directory) / ".dockerconfigjson"]
    if directory := environ.get("XDG_RUNTIME_DIR"):
        files.append(Path(directory) / "containers" / "auth.json")
    if home := environ.get("HOME"):
        files.append(Path(home) / ".docker" / "config.json")
    return files


def find_credential(
    registry: str,
    repository: str,
    environ: Mapping[str, str],
    run: RunHelper | None = None,
) -> Credential | None:
    """What is known for a repository of a registry; None: nothing.

    Args:
        run: calls helpers.

    Raises:
        ConfigError: a file is damaged, or a helper is missing.
        AccessDeniedError: a helper failed.
    """
    for file in credential_files(environ):
        document = _read(file)
        if document is not None:
            found = _from_document(document, file, registry, repository, run or run_helper)
            if found is not None:
                return found
    return None


def run_helper(program: str, server: str) -> tuple[int, bytes]:
    """Call a credential helper; what it prints to stderr is not looked at.

    Raises:
        ConfigError: it is not installed.
        AccessDeniedError: it did not end in time.
    """
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_HELPER_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise AccessDeniedError(
            f"the credential helper {program} did not answer within {_HELPER_PATIENCE_S:g} s",
            hint="try it by hand: it must not ask anything",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the credential helper {program} cannot be run: {error.strerror}",
            hint="install it where PATH leads, or take it out of config.json",
        ) from None
    return done.returncode, done.stdout


def _read(file: Path) -> dict[str, Any] | None:
    try:
        if not file.is_file():
            return None
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise ValueError("too large")
        document = json.loads(file.read_bytes())
        if not isinstance(document, dict):
            raise TypeError("no object")
    except OSError as error:
        raise ConfigError(
            f"the registry credentials in {file} cannot be read: {error.strerror}"
        ) from None
    except (ValueError, TypeError, RecursionError):
        # Not what is wrong with it: that may quote it.
        raise ConfigError(
            f"the registry credentials in {file} are no JSON object",
            hint="write it with docker login, or mount the pull secret's .dockerconfigjson",
        ) from None
    return document


def _from_document(
    document: Mapping[str, Any], file: Path, registry: str, repository: str, run: RunHelper
) -> Credential | None:
    helpers, store = document.get("credHelpers"), document.get("credsStore")
    if isinstance(helpers, dict):
        for key in _server_keys(registry):
            if isinstance(helpers.get(key), str):
                return _ask_helper(helpers[key], key, run)
    auths = document.get("auths")
    if isinstance(auths, dict):
        # Ports and schemes in keys vary with the program that wrote the file.
        by_server = {_bare(key): value for key, value in auths.items()}
        for key in _keys(registry, repository):
            entry = by_server.get(_bare(key))
            if isinstance(entry, dict) and (found := _from_entry(entry, file)) is not None:
                return found
    if isinstance(store, str) and store:
        for key in _server_keys(registry):
            if (found := _ask_helper(store, key, run)) is not None:
                return found
    return None


def _server_keys(registry: str) -> tuple[str, ...]:
    return (registry, *_DOCKER_HUB_KEYS) if registry == _DOCKER_HUB else (registry,)


def _keys(registry: str, repository: str) -> Iterator[str]:
    """The longest path first: a file may hold credentials for a part of a registry."""
    parts = repository.split("/")
    for end in range(len(parts), 0, -1):
        yield f"{registry}/{'/'.join(parts[:end])}"
    yield from _server_keys(registry)


def _bare(key: str) -> str:
    """A key without scheme, API version and slash at its end."""
    key = key.partition("://")[2] or key
    return key.rstrip("/").removesuffix("/v1").removesuffix("/v2")


def _from_entry(entry: Mapping[str, Any], file: Path) -> Credential | None:
    fields = {key: value for key, value in entry.items() if isinstance(value, str)}
    user, password = fields.get("username", ""), fields.get("password", "")
    if auth := fields.get("auth"):
        try:
            user, _, password = base64.b64decode(auth).decode().partition(":")
        except (binascii.Error, ValueError):
            raise ConfigError(
                f"an auth in {file} is no base64 of user:password", hint="docker login anew"
            ) from None
        password = password.rstrip("\0")
    found = Credential(
        origin=str(file),
        user=user,
        password=password,
        identity_token=fields.get("identitytoken", ""),
        registry_token=fields.get("registrytoken", ""),
    )
    # `docker login` with a store leaves an empty entry.
    return found if user or found.identity_token or found.registry_token else None


def _ask_helper(name: str, server: str, run: RunHelper) -> Credential | None:
    if not _HELPER.fullmatch(name):
        raise ConfigError(f"config.json names a credential helper {name[:40]!r}, which is no name")
    program = f"docker-credential-{name}"
    code, printed = run(program, server)
    if code != 0:
        if b"not found" in printed:
            return None
        raise AccessDeniedError(
            f"the credential helper {program} failed for {server} with exit code {code}",
            hint=f"try it by hand: echo {server} | {program} get",
        )
    try:
        said = json.loads(printed)
        user, secret = said["Username"], said["Secret"]
        if not (isinstance(user, str) and isinstance(secret, str)):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        raise AccessDeniedError(
            f"the credential helper {program} printed no credentials for {server}",
            hint=f"try it by hand: echo {server} | {program} get",
        ) from None
    if user == _IDENTITY_USER:
        return Credential(origin=program, identity_token=secret)
    return Credential(origin=program, user=user, password=secret) if user else None
